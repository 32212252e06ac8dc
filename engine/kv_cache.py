"""KVCache: the memory behind the block ids."""

import torch
from torch import Tensor

from loraplex.engine.block_storage import BlockStorage
from loraplex.engine.kv_cache_manager import BlockCopy
from loraplex.engine.kv_groups import KVGroup, KVLayer, group_size
from loraplex.kernels.dispatch import NAIVE, Kernels


def elements_per_block(layers: list[KVLayer], groups: list[KVGroup], block_size: int) -> list[int]:
    """Numbers that a block takes in each storage; storage j serves each group's j-th layer."""
    by_index = {layer.index: layer for layer in layers}
    return [
        max(
            by_index[group.layers[j]].elements(block_size)
            for group in groups
            if j < len(group.layers)
        )
        for j in range(group_size(groups))
    ]


class KVCache:
    """One storage [num_blocks, elements] per place in a group; layers see it through views."""

    def __init__(
        self,
        layers: list[KVLayer],
        groups: list[KVGroup],
        num_blocks: int,
        block_size: int,
        options: dict[str, torch.dtype | torch.device],
        kernels: Kernels = NAIVE,
    ) -> None:
        self.kernels = kernels  # which all that reads and writes here uses
        self._block_size = block_size
        rows = [
            kernels.empty(num_blocks, elements, **options)
            for elements in elements_per_block(layers, groups, block_size)
        ]
        self.storage = BlockStorage(rows, kernels)
        self._place = {index: j for group in groups for j, index in enumerate(group.layers)}

    def layer(self, layer: KVLayer) -> tuple[Tensor, Tensor]:
        """The layer's keys [N, KVH, BS, Dk] and values [N, KVH, BS, Dv], as views."""
        storage = self.storage.rows[self._place[layer.index]]
        heads, size = layer.num_kv_heads, self._block_size
        split = heads * size * layer.key_dim
        keys = storage[:, :split].view(-1, heads, size, layer.key_dim)
        values = storage[:, split : layer.elements(size)].view(-1, heads, size, layer.value_dim)
        return keys, values

    def copy(self, copies: list[BlockCopy]) -> None:
        if not copies:
            return
        device = self.storage.rows[0].device
        sources = torch.tensor([copy.source for copy in copies], device=device)
        targets = torch.tensor([copy.target for copy in copies], device=device)
        self.storage.copy(sources, targets)
