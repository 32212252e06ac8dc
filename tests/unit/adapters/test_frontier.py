"""From which layer on an adapter changes what is stored."""

import pytest

from loraplex.adapters.checks.catalogue import TargetKind, TargetModule
from loraplex.adapters.frontier import EVERY_LAYER, frontier


def modules(*names: str) -> list[TargetModule]:
    kinds = {"lm_head": TargetKind.LM_HEAD, "embed_tokens": TargetKind.EMBEDDING}
    return [
        TargetModule(name, kinds.get(name.rpartition(".")[2], TargetKind.LINEAR), 8, 8)
        for name in names
    ]


@pytest.mark.parametrize(
    ("names", "first_changed"),
    [
        (["model.layers.4.self_attn.k_proj"], 4),
        (["model.layers.4.self_attn.v_proj"], 4),
        (["model.layers.4.self_attn.qkv_proj"], 4),
        (["model.layers.4.self_attn.q_proj"], 5),
        (["model.layers.4.mlp.down_proj"], 5),
        (["model.layers.4.mlp.of_another_name"], 4),
        (["model.layers.4.self_attn.q_proj", "model.layers.5.self_attn.k_proj"], 5),
        (["model.layers.4.self_attn.q_proj", "model.layers.3.self_attn.k_proj"], 3),
        (["model.language_model.layers.11.self_attn.o_proj"], 12),
        (["transformer.h.7.attn.c_attn"], 7),
        (["lm_head"], EVERY_LAYER),
        (["lm_head", "model.layers.4.mlp.up_proj"], 5),
        (["model.embed_tokens"], 0),
        (["towers.3.embed_tokens"], 0),
        (["model.somewhere.else_proj"], 0),
        ([], EVERY_LAYER),
    ],
)
def test_the_first_changed_layer_follows_from_the_adapted_modules(
    names: list[str], first_changed: int
) -> None:
    assert frontier(modules(*names)) == first_changed
