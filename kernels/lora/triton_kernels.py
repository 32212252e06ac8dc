"""The Triton kernels of LoRA; `triton.py` launches them."""

import triton
import triton.language as tl

from loraplex.kernels.lora import triton_table as table

_ENTRY = tl.constexpr(table.ENTRY)
_HEADER = tl.constexpr(table.HEADER)
_FIELDS = tl.constexpr(table.FIELDS)
_MAX_RANKS = tl.constexpr(table.MAX_RANKS)
_ALIGNMENT = tl.constexpr(table.ALIGNMENT)


@triton.jit
def _first_tiles(starts, num_segments, ROWS: tl.constexpr, SEGMENTS: tl.constexpr):
    """The first tile of each segment, and the tile behind the last of those that have rows.

    Segment c owns the tiles from starts[c] // ROWS + c on, which is always enough: so each program
    finds its own without a sum over those before.
    """
    segments = tl.arange(0, SEGMENTS)
    is_one = segments < num_segments
    start = tl.load(starts + segments, mask=is_one, other=0).to(tl.int32)
    end = tl.load(starts + segments + 1, mask=is_one, other=0).to(tl.int32)
    first_tiles = start // ROWS + segments
    behind = tl.where(end > start, first_tiles + tl.cdiv(end - start, ROWS), 0)
    return tl.where(is_one, first_tiles, 2**31 - 1), behind


@triton.jit
def _num_tiles(starts, num_segments, ROWS: tl.constexpr, SEGMENTS: tl.constexpr):
    _, behind = _first_tiles(starts, num_segments, ROWS, SEGMENTS)
    return tl.max(behind, axis=0)


@triton.jit
def _find(tile, slots, starts, num_segments, ROWS: tl.constexpr, SEGMENTS: tl.constexpr):
    """The adapter's slot of a tile, its first place in the grouped rows, and the place behind the
    segment's last. A tile may be one too many for its segment: then it begins behind the last."""
    first_tiles, _ = _first_tiles(starts, num_segments, ROWS, SEGMENTS)
    segment = tl.sum((first_tiles <= tile).to(tl.int32), axis=0) - 1
    start = tl.load(starts + segment).to(tl.int32)
    first = start + (tile - segment - start // ROWS) * ROWS
    slot = tl.maximum(tl.load(slots + segment), 0)
    return slot, first, tl.load(starts + segment + 1).to(tl.int32)


@triton.jit
def _multiply(x, weights, total):
    """total + x weights, in float32. Numbers of one half precision multiply as they are."""
    if (x.dtype == weights.dtype) & (x.dtype != tl.float32):
        product = tl.dot(x, weights, total)
    else:
        product = tl.dot(x.to(tl.float32), weights.to(tl.float32), total, input_precision="tf32x3")
    return product


@triton.jit
def _multiply_hidden(hidden, weights, total):
    """total + hidden weights, hidden in float32; against half precision as a sum of two such.
    In float16, hidden numbers beyond its range overflow, as they do in PEFT."""
    if weights.dtype == tl.float32:
        product = _multiply(hidden, weights, total)
    else:
        high = hidden.to(weights.dtype)
        low = (hidden - high.to(tl.float32)).to(weights.dtype)
        product = tl.dot(high, weights, tl.dot(low, weights, total))
    return product


@triton.jit(do_not_specialize=["num_segments", "num_rows"])
def shrink_kernel(
    x,  # [T, in]
    hidden,  # [parts, T, MAX_RANKS] float32
    entries,
    rows,
    slots,
    starts,
    num_segments,
    num_rows,
    in_features,
    x_row,
    x_column,
    part_size,  # inputs per part
    WEIGHTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """hidden[part, place, rank] = sum over the part's inputs of x[row, input] A[rank, input]."""
    part = tl.program_id(2)
    last_input = tl.minimum((part + 1) * part_size, in_features)
    num_tiles = _num_tiles(starts, num_segments, ROWS, SEGMENTS)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        slot, first, end = _find(tile, slots, starts, num_segments, ROWS, SEGMENTS)
        entry = entries + slot * _ENTRY
        a = tl.multiple_of(tl.load(entry).to(tl.pointer_type(WEIGHTS)), 16)
        num_ranks = tl.where(first < end, tl.load(entry + 1).to(tl.int32), 0)
        places = first + tl.arange(0, ROWS)
        is_row = places < end
        row = tl.load(rows + places, mask=is_row, other=0)
        x_rows = x + row[:, None] * x_row
        hidden_rows = hidden + (part * num_rows.to(tl.int64) + places)[:, None] * _MAX_RANKS
        for first_rank in range(tl.program_id(1) * RANKS, num_ranks, tl.num_programs(1) * RANKS):
            rank = first_rank + tl.arange(0, RANKS)
            is_rank = rank < num_ranks
            a_rows = a + rank.to(tl.int64)[None, :] * in_features
            total = tl.zeros([ROWS, RANKS], dtype=tl.float32)
            for first_input in range(part * part_size, last_input, INPUTS):
                inputs = first_input + tl.arange(0, INPUTS)
                is_input = inputs < last_input
                x_tile = tl.load(
                    x_rows + inputs.to(tl.int64)[None, :] * x_column,
                    mask=is_row[:, None] & is_input[None, :],
                    other=0.0,
                )
                a_tile = tl.load(
                    a_rows + inputs[:, None], mask=is_input[:, None] & is_rank[None, :], other=0.0
                )
                total = _multiply(x_tile, a_tile, total)
            tl.store(hidden_rows + rank[None, :], total, mask=is_row[:, None] & is_rank[None, :])


@triton.jit(do_not_specialize=["num_segments"])
def look_up_kernel(
    token_ids,  # [T]
    hidden,  # [1, T, MAX_RANKS] float32
    entries,
    rows,
    slots,
    starts,
    num_segments,
    token_stride,
    embed_scale,
    WEIGHTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """hidden[0, place, rank] = embed_scale A[token of the row, rank]"""
    num_tiles = _num_tiles(starts, num_segments, ROWS, SEGMENTS)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        slot, first, end = _find(tile, slots, starts, num_segments, ROWS, SEGMENTS)
        entry = entries + slot * _ENTRY
        a = tl.multiple_of(tl.load(entry).to(tl.pointer_type(WEIGHTS)), 16)
        num_ranks = tl.where(first < end, tl.load(entry + 1).to(tl.int32), 0)
        places = first + tl.arange(0, ROWS)
        is_row = places < end
        row = tl.load(rows + places, mask=is_row, other=0)
        token = tl.load(token_ids + row * token_stride, mask=is_row, other=0).to(tl.int64)
        for first_rank in range(0, num_ranks, RANKS):
            rank = first_rank + tl.arange(0, RANKS)
            mask = is_row[:, None] & (rank < num_ranks)[None, :]
            found = tl.load(a + token[:, None] * num_ranks + rank[None, :], mask=mask, other=0.0)
            tl.store(
                hidden + places.to(tl.int64)[:, None] * _MAX_RANKS + rank[None, :],
                found.to(tl.float32) * embed_scale,
                mask=mask,
            )


@triton.jit(do_not_specialize=["num_segments", "num_rows"])
def expand_kernel(
    hidden,  # [parts, T, MAX_RANKS] float32
    out,  # [T, width]
    entries,
    rows,
    slots,
    starts,
    num_segments,
    num_rows,
    width,
    out_row,
    out_column,
    WEIGHTS: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """out[row, column] += scaling * sum over ranks of hidden[place, rank] B[rank, column]"""
    first_column = tl.program_id(1) * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    num_tiles = _num_tiles(starts, num_segments, ROWS, SEGMENTS)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        slot, first, end = _find(tile, slots, starts, num_segments, ROWS, SEGMENTS)
        entry = entries + slot * _ENTRY
        num_slices = tl.where(first < end, tl.load(entry + 2).to(tl.int32), 0)
        places = first + tl.arange(0, ROWS)
        is_row = places < end
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        is_adapted = column < 0
        num_adapted = 0
        hidden_rows = hidden + places.to(tl.int64)[:, None] * _MAX_RANKS
        for index in range(num_slices):
            fields = entry + _HEADER + index * _FIELDS
            start = tl.load(fields).to(tl.int32)
            stop = start + tl.load(fields + 1).to(tl.int32)
            slice_ranks = tl.load(fields + 2).to(tl.int32)
            scaling = tl.load(fields + 4).to(tl.int32).to(tl.float32, bitcast=True)
            b = tl.multiple_of(tl.load(fields + 3).to(tl.pointer_type(WEIGHTS)), 16)
            overlaps = (start < first_column + COLUMNS) & (first_column < stop)
            is_adapted = is_adapted | ((start <= column) & (column < stop))
            num_adapted += overlaps.to(tl.int32)
            b_start = tl.multiple_of(start // _ALIGNMENT * _ALIGNMENT, 16)
            b_stop = tl.multiple_of(tl.cdiv(stop, _ALIGNMENT) * _ALIGNMENT, 16)
            is_stored = (b_start <= column) & (column < b_stop)
            for first_rank in range(0, tl.where(overlaps, slice_ranks, 0), RANKS):
                rank = first_rank + tl.arange(0, RANKS)
                is_rank = rank < slice_ranks
                hidden_tile = tl.zeros([ROWS, RANKS], dtype=tl.float32)
                for part in tl.static_range(PARTS):
                    hidden_tile += tl.load(
                        hidden_rows + part * num_rows.to(tl.int64) * _MAX_RANKS + rank[None, :],
                        mask=is_row[:, None] & is_rank[None, :],
                        other=0.0,
                    )
                b_rows = b + rank.to(tl.int64)[:, None] * (b_stop - b_start)
                b_tile = tl.load(
                    b_rows + (column - b_start)[None, :],
                    mask=is_rank[:, None] & is_stored[None, :],
                    other=0.0,
                )
                total = _multiply_hidden(hidden_tile * scaling, b_tile, total)
            hidden_rows += slice_ranks
        if num_adapted > 0:
            row = tl.load(rows + places, mask=is_row, other=0)
            numbers = out + row[:, None] * out_row + column.to(tl.int64)[None, :] * out_column
            is_number = is_row[:, None] & (column < width)[None, :]
            before = tl.load(numbers, mask=is_number, other=0.0)
            after = (before.to(tl.float32) + total).to(out.dtype.element_ty)
            tl.store(numbers, tl.where(is_adapted[None, :], after, before), mask=is_number)
