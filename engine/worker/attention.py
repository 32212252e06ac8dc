"""Our attention, plugged into transformers' models through their attention interface."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from loraplex.engine.kv.storage.groups import KVGroup, KVLayer
from loraplex.engine.model.probe import HOOK, AttentionProbe
from loraplex.engine.worker.kv_cache import KVCache
from loraplex.kernels.attention.spans import QuerySpans
from loraplex.kernels.kernel_set import Kernels


@dataclass(frozen=True)
class AttentionBatch:
    """The places of one step's flat rows."""

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
        self._window = layer.state.window
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


def install_attention(
    probe: AttentionProbe, groups: list[KVGroup], cache: KVCache, context: AttentionContext
) -> None:
    """Gives every attention module of the probed model its PagedAttention."""
    for group_index, group in enumerate(groups):
        for index in group.layers:
            attention = PagedAttention(context, group_index, probe.layers[index], cache)
            setattr(probe.modules[index], HOOK, attention)
