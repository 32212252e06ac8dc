"""KVCache: the keys and values of all layers, as memory in equal blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex.engine.kv.storage.format import KVFormat
from loraplex.engine.kv.storage.groups import KVGroup, KVLayer, group_size
from loraplex.engine.kv.storage.layout import KVLayout
from loraplex.engine.step import BlockCopy
from loraplex.kernels.dispatch import NAIVE
from loraplex.kernels.kernel_set import Kernels


class BlockStorage:
    """Several tensors whose equal rows are read, written and copied together."""

    def __init__(self, rows: Sequence[Tensor], kernels: Kernels) -> None:
        """`rows`: [N, E_j], each contiguous, of one dtype and device, which `kernels` serve."""
        self.rows = list(rows)
        self._kernels = kernels

    @property
    def num_blocks(self) -> int:
        return len(self.rows[0])

    @property
    def device(self) -> torch.device:
        return self.rows[0].device

    @property
    def widths(self) -> list[int]:
        """Returns how many numbers a block takes in each tensor."""
        return [row.shape[1] for row in self.rows]

    @property
    def bytes_per_block(self) -> int:
        return sum(self.widths) * self.rows[0].element_size()

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies blocks as if all sources were read first; ids [C] int64, on the same device."""
        for row in self.rows:
            self._kernels.copy_blocks(row, sources, targets)

    def gather(self, ids: Tensor, out: Sequence[Tensor]) -> None:
        """Copies blocks out: ids [C] int64 on the same device, out[j] [C, E_j] contiguous."""
        for row, blocks in zip(self.rows, out, strict=True):
            self._kernels.gather_blocks(row, ids, blocks)

    def read(self, block_ids: Sequence[int]) -> list[bytes]:
        """Returns copies of blocks on the host, each as its parts one after another."""
        ids = torch.tensor(block_ids, device=self.rows[0].device)
        parts = [row[ids].cpu().view(torch.uint8).numpy() for row in self.rows]
        return [b"".join(part[i].tobytes() for part in parts) for i in range(len(block_ids))]

    def scatter(self, ids: Tensor, blocks: Sequence[Tensor]) -> None:
        """The inverse of `gather`; no id may appear twice."""
        for row, part in zip(self.rows, blocks, strict=True):
            self._kernels.scatter_blocks(row, ids, part)


def kv_format_of(dtype: torch.dtype) -> KVFormat:
    """Returns the format that stores keys and values as the model computes them."""
    return KVFormat(str(dtype).removeprefix("torch."), dtype.itemsize)


def numbers_per_block(
    layers: list[KVLayer], groups: list[KVGroup], block_size: int, kv_format: KVFormat
) -> list[int]:
    """Returns how many numbers a block takes in each storage; storage j serves each group's j-th
    layer."""
    by_index = {layer.index: layer for layer in layers}
    return [
        max(
            kv_format.numbers(by_index[group.layers[j]], block_size)
            for group in groups
            if j < len(group.layers)
        )
        for j in range(group_size(groups))
    ]


class KVCache:
    """One storage [num_blocks, numbers] per place in a group; layers see it through views."""

    def __init__(
        self,
        layers: list[KVLayer],
        layout: KVLayout,
        kv_format: KVFormat,
        num_blocks: int,
        device: torch.device,
        kernels: Kernels = NAIVE,
    ) -> None:
        groups, size = layout.groups, layout.block_size
        self.kernels = kernels  # which all that reads and writes here uses
        self.format = kv_format
        self._block_size = size
        dtype: torch.dtype = getattr(torch, kv_format.number)
        rows = [
            kernels.empty(num_blocks, numbers, dtype=dtype, device=device)
            for numbers in numbers_per_block(layers, groups, size, kv_format)
        ]
        self.storage = BlockStorage(rows, kernels)
        self._place = {index: j for group in groups for j, index in enumerate(group.layers)}

    def layer(self, layer: KVLayer) -> tuple[Tensor, Tensor]:
        """Returns views of the layer's keys [N, KVH, BS, Dk] and values [N, KVH, BS, Dv]."""
        storage = self.storage.rows[self._place[layer.index]]
        heads, size = layer.num_kv_heads, self._block_size
        split = self.format.key_numbers(layer, size)
        end = self.format.numbers(layer, size)
        keys = storage[:, :split].view(-1, heads, size, layer.key_dim)
        values = storage[:, split:end].view(-1, heads, size, layer.value_dim)
        return keys, values

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        if not copies:
            return
        device = self.storage.rows[0].device
        sources = torch.tensor([copy.source for copy in copies], device=device)
        targets = torch.tensor([copy.target for copy in copies], device=device)
        self.storage.copy(sources, targets)
