"""AttentionProbe: what the attention layers of a model would store."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.kv.groups import KVLayer
from loraplex.engine.kv.layer_state import attention_state

ATTENTION = "loraplex_paged"  # our name in transformers' registry
HOOK = "loraplex_attention"  # attribute of an attention module: its PagedAttention


class AttentionProbe:
    """Stands in for the attention during one dry forward and notes what each layer would store."""

    def __init__(self) -> None:
        self.layers: dict[int, KVLayer] = {}
        self.modules: dict[int, nn.Module] = {}

    def record(self, module: nn.Module, key: Tensor, value: Tensor, window: int | None) -> None:
        index = int(getattr(module, "layer_idx"))  # noqa: B009 - transformers' modules are untyped
        if not getattr(module, "is_causal", True):
            raise UnsupportedModel(f"layer {index} attends in both directions; decoders only")
        self.modules[index] = module
        state = attention_state(window)
        self.layers[index] = KVLayer(index, key.shape[1], key.shape[-1], value.shape[-1], state)


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    hook = getattr(module, HOOK)
    if isinstance(hook, AttentionProbe):
        hook.record(module, key, value, options.get("sliding_window"))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
    scaling = options.get("scaling")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    return hook(query, key, value, scaling, options), None


AttentionInterface.register(ATTENTION, _attention_forward)


def probe_layers(model: PreTrainedModel) -> AttentionProbe:
    """Finds out, by one dry forward of one token, what each attention layer stores.

    Raises:
        UnsupportedModel: where a decoder layer does not go through the attention interface.
    """
    probe = AttentionProbe()
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            setattr(module, HOOK, probe)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(input_ids=token, position_ids=token, use_cache=False, logits_to_keep=1)
    num_layers = model.config.get_text_config().num_hidden_layers
    if sorted(probe.layers) != list(range(num_layers)):
        raise UnsupportedModel(
            f"{model.config.model_type}: {len(probe.layers)} of {num_layers} layers use attention; "
            "state-space and linear-attention layers are not supported"
        )
    return probe
