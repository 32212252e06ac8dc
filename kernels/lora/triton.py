"""LoRA for a flat batch of mixed adapters in Triton.

Two launches: shrink, x A^T into float32 scratch, and expand, which adds the scratch times B to the
output. A tile has rows of one segment. Programs take tiles in turn and find out on the device whose
they are, so that grids follow from shapes alone; base rows are in no tile. Long sums over the
inputs are cut into parts, which the expand kernel adds in order: no atomics, so that a row's result
does not depend on the rows beside it.
(Segments as in Punica's SGMV, arXiv 2310.18547;
mixed ranks without padding as in S-LoRA, arXiv 2311.03285; here by pointers in place of pages.)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex.kernels.lora.batch import LoRABatch
from loraplex.kernels.lora.triton_kernels import expand_kernel, look_up_kernel, shrink_kernel
from loraplex.kernels.lora.triton_table import MAX_RANKS, LoRATable
from loraplex.kernels.lora.triton_tiles import LoRATiles, tiles_for

_ELEMENTS = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def add_lora(out: Tensor, x: Tensor, table: LoRATable, batch: LoRABatch) -> None:
    """As `naive.add_lora`, on the device of the table."""
    add_cut(tiles_for(x.shape[0], x.shape[1], table.dtype), out, x, table, batch)


def add_cut(tiles: LoRATiles, out: Tensor, x: Tensor, table: LoRATable, batch: LoRABatch) -> None:
    """`add_lora`, cut into programs as told."""
    if out.numel() == 0 or x.numel() == 0:
        return
    hidden = _scratch(tiles.parts, out)
    shrink_kernel[tiles.shrink_grid(batch)](
        x,
        hidden,
        table.entries,
        batch.rows,
        batch.slots,
        batch.starts,
        batch.slots.shape[0],
        out.shape[0],
        x.shape[1],
        x.stride(0),
        x.stride(1),
        tiles.part_size,
        WEIGHTS=_ELEMENTS[table.dtype],
        ROWS=tiles.rows,
        RANKS=tiles.ranks,
        INPUTS=tiles.inputs,
        SEGMENTS=_power_of_two(batch),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    _add_expanded(out, hidden, table, batch, tiles)


def add_embedding_lora(
    out: Tensor, token_ids: Tensor, table: LoRATable, batch: LoRABatch, embed_scale: float
) -> None:
    """As `naive.add_embedding_lora`, with a table for embeddings."""
    if out.numel() == 0:
        return
    tiles = tiles_for(out.shape[0], 1, table.dtype)
    hidden = _scratch(tiles.parts, out)
    look_up_kernel[tiles.shrink_grid(batch)[:1]](
        token_ids,
        hidden,
        table.entries,
        batch.rows,
        batch.slots,
        batch.starts,
        batch.slots.shape[0],
        token_ids.stride(0),
        embed_scale,
        WEIGHTS=_ELEMENTS[table.dtype],
        ROWS=tiles.rows,
        RANKS=tiles.ranks,
        SEGMENTS=_power_of_two(batch),
        num_warps=tiles.warps,
        num_stages=1,
    )
    _add_expanded(out, hidden, table, batch, tiles)


def _add_expanded(
    out: Tensor, hidden: Tensor, table: LoRATable, batch: LoRABatch, tiles: LoRATiles
) -> None:
    width = out.shape[1]
    expand_kernel[tiles.expand_grid(batch, width)](
        hidden,
        out,
        table.entries,
        batch.rows,
        batch.slots,
        batch.starts,
        batch.slots.shape[0],
        out.shape[0],
        width,
        out.stride(0),
        out.stride(1),
        WEIGHTS=_ELEMENTS[table.dtype],
        PARTS=tiles.parts,
        ROWS=tiles.expand_rows,
        RANKS=tiles.expand_ranks,
        COLUMNS=tiles.columns,
        SEGMENTS=_power_of_two(batch),
        num_warps=tiles.warps,
        num_stages=1,
    )


def _scratch(parts: int, out: Tensor) -> Tensor:
    """[parts, T, MAX_RANKS] float32; of a row only its adapter's ranks are written and read."""
    return torch.empty(parts, out.shape[0], MAX_RANKS, dtype=torch.float32, device=out.device)


def _power_of_two(batch: LoRABatch) -> int:
    return int(max(16, triton.next_power_of_2(batch.slots.shape[0])))
