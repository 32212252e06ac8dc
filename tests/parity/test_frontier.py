"""Below its frontier an adapter changes no key and no value, in every architecture."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.architectures import ARCHITECTURES, load_reference, write_checkpoint

from loraplex.adapters.frontier import frontier
from loraplex.adapters.targets import catalogue_of

pytestmark = pytest.mark.device

IDS = torch.tensor([[7, 30, 100, 200, 5, 8, 90, 41]])  # fewer than a window shows
Stored = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values of each layer


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_first_changed_layer_is_the_frontier(architecture: str, tmp_path: Path) -> None:
    model = load_reference(write_checkpoint(tmp_path / "base", architecture))
    base = stored(model)

    for module in catalogue_of(model).modules.values():
        handle = model.get_submodule(module.name).register_forward_hook(shift)
        adapted = stored(model)
        handle.remove()

        changed = [
            layer
            for layer, pair in enumerate(zip(base, adapted, strict=True))
            if not all(map(torch.equal, *pair))
        ]
        first_changed = min(changed, default=len(base))
        assert first_changed == min(frontier([module]), len(base)), module.name


@torch.no_grad()
def stored(model: Any) -> Stored:
    cache = model(input_ids=IDS, use_cache=True).past_key_values
    return [(layer.keys, layer.values) for layer in cache.layers]


def shift(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """As LoRA would, but everywhere."""
    noise = torch.rand(output.shape, generator=torch.Generator().manual_seed(1))
    return output + noise
