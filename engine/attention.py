"""Our attention, plugged into transformers' models through their attention interface."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.kv_cache import KVCache
from loraplex.engine.kv_groups import KVGroup, KVLayer
from loraplex.kernels.attention.spans import QuerySpans
from loraplex.kernels.dispatch import Kernels

ATTENTION = "loraplex_paged"  # our name in transformers' registry
_HOOK = "loraplex_attention"  # attribute of an attention module: its PagedAttention


@dataclass(frozen=True)
class AttentionBatch:
    """Where the flat rows of one step belong."""

    spans: QuerySpans  # of S sequences
    slot_mapping: list[Tensor]  # per group: [T] int64
    block_tables: Tensor  # [G, S, B] int64


class AttentionContext:
    """Carries the batch of the running step to every attention layer of one model."""

    def __init__(self) -> None:
        self.batch: AttentionBatch | None = None


class PagedAttention:
    """One layer's attention over its part of the paged cache."""

    def __init__(
        self, context: AttentionContext, group: int, layer: KVLayer, cache: KVCache
    ) -> None:
        self._kernels: Kernels = cache.kernels
        self._context = context
        self._group = group
        self._window = layer.window
        self._keys, self._values = cache.layer(layer)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, options: dict[str, Any]
    ) -> Tensor:
        """query [1, H, T, Dk], key [1, KVH, T, Dk], value [1, KVH, T, Dv] -> [1, T, H, Dv]."""
        batch = self._context.batch
        if batch is None:
            raise RuntimeError("attention was called outside of a step")
        self._kernels.write_cache(
            self._keys,
            self._values,
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            batch.slot_mapping[self._group],
        )
        return self._kernels.paged_attention(
            query[0].transpose(0, 1),
            self._keys,
            self._values,
            batch.block_tables[self._group],
            batch.spans,
            scaling,
            window=self._window,
            softcap=options.get("softcap"),
            sinks=options.get("s_aux"),
        ).unsqueeze(0)


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
        self.layers[index] = KVLayer(index, key.shape[1], key.shape[-1], value.shape[-1], window)


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    hook = getattr(module, _HOOK)
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
            setattr(module, _HOOK, probe)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(input_ids=token, position_ids=token, use_cache=False, logits_to_keep=1)
    num_layers = model.config.get_text_config().num_hidden_layers
    if sorted(probe.layers) != list(range(num_layers)):
        raise UnsupportedModel(
            f"{model.config.model_type}: {len(probe.layers)} of {num_layers} layers use attention; "
            "state-space and linear-attention layers are not supported"
        )
    return probe


def install_attention(
    probe: AttentionProbe, groups: list[KVGroup], cache: KVCache, context: AttentionContext
) -> None:
    """Gives every attention module of the probed model its PagedAttention."""
    for group_index, group in enumerate(groups):
        for index in group.layers:
            attention = PagedAttention(context, group_index, probe.layers[index], cache)
            setattr(probe.modules[index], _HOOK, attention)
