"""LoRATiles: how the Triton LoRA kernels cut their work, chosen from shapes and dtype alone."""

from dataclasses import dataclass, replace

import torch
import triton

from loraplex.kernels.lora.batch import LoRABatch

_FEW_ROWS = 1024  # up to here there are too few tiles of rows to fill a GPU
_PART = 512  # inputs worth a program of its own
_MAX_PARTS = 16


@dataclass(frozen=True)
class LoRATiles:
    """Sizes of a program's tiles, all powers of two, and how many programs share a tile."""

    rows: int
    ranks: int  # on the way down
    inputs: int
    shrink_warps: int
    shrink_stages: int
    ranks_up: int
    columns: int
    expand_warps: int
    expand_stages: int
    rank_programs: int = 1  # over the ranks of one adapter
    parts: int = 1  # over the inputs
    part_size: int = 0  # inputs in each part but the last

    def row_tiles(self, batch: LoRABatch) -> int:
        """As many as any grouping of the batch's rows can need."""
        return batch.rows.shape[0] // self.rows + batch.slots.shape[0]


FEW_ROWS = LoRATiles(
    rows=16,
    ranks=32,
    inputs=128,
    shrink_warps=4,
    shrink_stages=4,
    ranks_up=16,
    columns=128,
    expand_warps=4,
    expand_stages=2,
    rank_programs=2,
)
MANY_ROWS = LoRATiles(
    rows=64,
    ranks=64,
    inputs=64,
    shrink_warps=4,
    shrink_stages=3,
    ranks_up=32,
    columns=128,
    expand_warps=8,
    expand_stages=2,
)
FLOAT32_FEW_ROWS = LoRATiles(
    rows=16,
    ranks=16,
    inputs=64,
    shrink_warps=4,
    shrink_stages=3,
    ranks_up=16,
    columns=64,
    expand_warps=4,
    expand_stages=2,
    rank_programs=2,
)
FLOAT32_MANY_ROWS = LoRATiles(
    rows=32,
    ranks=32,
    inputs=32,
    shrink_warps=4,
    shrink_stages=3,
    ranks_up=16,
    columns=64,
    expand_warps=4,
    expand_stages=2,
)


def tiles_for(num_rows: int, in_features: int, dtype: torch.dtype) -> LoRATiles:
    """The tiles for so many rows. The cut over the inputs follows from their number alone."""
    is_wide = dtype == torch.float32
    if num_rows > _FEW_ROWS:
        tiles = FLOAT32_MANY_ROWS if is_wide else MANY_ROWS
        return replace(tiles, part_size=in_features)
    tiles = FLOAT32_FEW_ROWS if is_wide else FEW_ROWS
    parts = min(triton.next_power_of_2(triton.cdiv(in_features, _PART)), _MAX_PARTS)
    part_size = triton.cdiv(triton.cdiv(in_features, parts), tiles.inputs) * tiles.inputs
    return replace(tiles, parts=parts, part_size=part_size)
