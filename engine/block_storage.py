"""BlockStorage: memory in equal blocks, each of which is a row in every one of some tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex.kernels.dispatch import Kernels


class BlockStorage:
    """The same rows of several tensors are read, written and copied together."""

    def __init__(self, rows: Sequence[Tensor], kernels: Kernels) -> None:
        """`rows`: [N, E_j], each contiguous, of one dtype and device, which `kernels` serve."""
        self.rows = list(rows)
        self._kernels = kernels

    @property
    def num_blocks(self) -> int:
        return len(self.rows[0])

    @property
    def widths(self) -> list[int]:
        """Numbers that a block takes in each tensor."""
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
        """Copies of blocks on the host, each as its parts one after another."""
        ids = torch.tensor(block_ids, device=self.rows[0].device)
        parts = [row[ids].cpu().view(torch.uint8).numpy() for row in self.rows]
        return [b"".join(part[i].tobytes() for part in parts) for i in range(len(block_ids))]

    def scatter(self, ids: Tensor, blocks: Sequence[Tensor]) -> None:
        """The inverse of `gather`; each id but once."""
        for row, part in zip(self.rows, blocks, strict=True):
            self._kernels.scatter_blocks(row, ids, part)
