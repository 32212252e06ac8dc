"""LoRATiles: how the Triton LoRA kernels cut their work, chosen from shapes and dtype alone."""

from dataclasses import dataclass, replace

import torch
import triton

from loraplex.kernels.lora.batch import LoRABatch

_FEW_ROWS = 1024  # up to here there are too few tiles of rows to fill a GPU
_PART = 512  # inputs worth a program of its own
_MAX_PARTS = 16
PROGRAMS = 1024  # about eight for each multiprocessor


@dataclass(frozen=True)
class LoRATiles:
    """Sizes of a program's tiles, all powers of two, and how many programs share one.

    A shrink program multiplies `rows` rows by `ranks` ranks, `inputs` numbers at a time. An expand
    program adds to `expand_rows` rows of `columns` columns, `expand_ranks` ranks at a time.
    """

    rows: int
    ranks: int
    inputs: int
    stages: int  # tiles of inputs in flight
    rank_programs: int  # over the ranks of one adapter
    expand_rows: int
    columns: int
    expand_ranks: int = 16
    warps: int = 4
    parts: int = 1  # over the inputs
    part_size: int = 0  # inputs in each part but the last

    def shrink_grid(self, batch: LoRABatch) -> tuple[int, int, int]:
        """Programs over tiles of rows, over ranks and over parts."""
        shares = self.rank_programs * self.parts
        return _programs(batch, self.rows, shares), self.rank_programs, self.parts

    def expand_grid(self, batch: LoRABatch, width: int) -> tuple[int, int]:
        """Programs over tiles of rows and over tiles of columns."""
        column_tiles = triton.cdiv(width, self.columns)
        return _programs(batch, self.expand_rows, column_tiles), column_tiles


def _programs(batch: LoRABatch, rows: int, shares: int) -> int:
    """Returns so many programs that those of all `shares` of a tile fill a GPU once or twice.

    Each takes one tile after another. One for each tile that a batch of these shapes may need would
    be too many where few segments are in use: the others start for nothing.
    """
    most = batch.rows.shape[0] // rows + batch.slots.shape[0]
    return int(min(most, triton.cdiv(PROGRAMS, shares)))


# Few rows wait for the weights, so that many small programs are best; many rows wait for x and the
# output. No register spills, and on an H100 at least eight warps of each are on a multiprocessor.
_FEW = LoRATiles(
    rows=16, ranks=16, inputs=128, stages=4, rank_programs=3, expand_rows=16, columns=128
)
_MANY = LoRATiles(
    rows=64, ranks=64, inputs=64, stages=3, rank_programs=1, expand_rows=32, columns=128
)
_FEW_WIDE = LoRATiles(
    rows=16, ranks=16, inputs=64, stages=3, rank_programs=3, expand_rows=16, columns=64
)
_MANY_WIDE = LoRATiles(
    rows=32, ranks=32, inputs=32, stages=3, rank_programs=1, expand_rows=32, columns=64
)


def tiles_for(num_rows: int, in_features: int, dtype: torch.dtype) -> LoRATiles:
    """Returns the tiles for so many rows. The cut over the inputs follows from their number
    alone."""
    is_wide = dtype == torch.float32
    if num_rows > _FEW_ROWS:
        tiles = _MANY_WIDE if is_wide else _MANY
        return replace(tiles, part_size=in_features)
    tiles = _FEW_WIDE if is_wide else _FEW
    wanted = max(1, triton.cdiv(in_features, _PART))
    parts = min(triton.next_power_of_2(wanted), _MAX_PARTS)
    part_size = triton.cdiv(triton.cdiv(in_features, parts), tiles.inputs) * tiles.inputs
    return replace(tiles, parts=parts, part_size=part_size)
