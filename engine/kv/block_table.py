"""BlockTable: the blocks of one sequence."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loraplex.engine.kv.block_pool import NULL_BLOCK_ID, KVCacheBlock


@dataclass
class BlockTable:
    """One sequence's blocks, per KV group; `ids` mirrors `blocks` for the device."""

    blocks: list[list[KVCacheBlock]]
    ids: NDArray[np.int32]  # [groups, max blocks]
    num_skipped: list[int]  # per group: blocks behind the window
    first_writable: NDArray[np.int64]  # [groups]: what lies before came from the cache
    num_indexed: int = 0  # full blocks that the prefix cache was offered

    @classmethod
    def empty(cls, num_groups: int, max_blocks: int) -> "BlockTable":
        return cls(
            blocks=[[] for _ in range(num_groups)],
            ids=np.full((num_groups, max_blocks), NULL_BLOCK_ID, np.int32),
            num_skipped=[0] * num_groups,
            first_writable=np.zeros(num_groups, np.int64),
        )

    @property
    def num_held(self) -> list[int]:
        """Returns, per group, the number of blocks that are not behind the window."""
        return [
            len(row) - passed for row, passed in zip(self.blocks, self.num_skipped, strict=True)
        ]

    def copy(self) -> "BlockTable":
        return BlockTable(
            [list(row) for row in self.blocks],
            self.ids.copy(),
            list(self.num_skipped),
            self.first_writable.copy(),
            self.num_indexed,
        )

    def extend(self, group: int, blocks: list[KVCacheBlock]) -> None:
        start = len(self.blocks[group])
        self.ids[group, start : start + len(blocks)] = [block.block_id for block in blocks]
        self.blocks[group] += blocks

    def append(self, group: int, block: KVCacheBlock) -> None:
        self.ids[group, len(self.blocks[group])] = block.block_id
        self.blocks[group].append(block)

    def replace(self, group: int, index: int, block: KVCacheBlock) -> None:
        self.blocks[group][index] = block
        self.ids[group, index] = block.block_id

    def check(self) -> None:
        """Raises RuntimeError where the device's mirror differs from the blocks."""
        for group, row in enumerate(self.blocks):
            ids = [block.block_id for block in row]
            if ids != self.ids[group, : len(row)].tolist() or self.ids[group, len(row) :].any():
                raise RuntimeError("a block table's device mirror differs from its blocks")
