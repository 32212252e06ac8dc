"""The Triton kernels of sampling; `triton.py` launches them."""

import triton
import triton.language as tl

_BEHIND_ALL = tl.constexpr(2**31 - 1)


@triton.jit
def _first_greatest(values, ids, mask):
    """The greatest value, NaN above all, and the least id that has it."""
    is_nan = mask & (values != values)  # noqa: PLR0124
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    greatest = tl.max(tl.where(mask & (is_nan == 0), values, float("-inf")), axis=0)
    is_greatest = tl.where(has_nan, is_nan, mask & (values == greatest))
    first = tl.min(tl.where(is_greatest, ids, _BEHIND_ALL), axis=0)
    return tl.where(has_nan, float("nan"), greatest), first


@triton.jit
def argmax_kernel(
    logits,  # [R, V]
    values,  # [R, parts] float32
    ids,  # [R, parts] int32
    vocabulary,
    row_stride,
    column_stride,
    COLUMNS: tl.constexpr,
):
    """The greatest of each part of a row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < vocabulary
    found = tl.load(
        logits + row * row_stride + column.to(tl.int64) * column_stride, mask=mask, other=0.0
    )
    value, first = _first_greatest(found.to(tl.float32), column, mask)
    place = row * tl.num_programs(1) + part
    tl.store(values + place, value)
    tl.store(ids + place, first)


@triton.jit(do_not_specialize=["num_parts"])
def greatest_part_kernel(
    values,  # [R, parts] float32
    ids,  # [R, parts] int32
    out,  # [R] int64
    num_parts,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    mask = part < num_parts
    found = tl.load(values + row * num_parts + part, mask=mask, other=0.0)
    first = tl.load(ids + row * num_parts + part, mask=mask, other=0)
    _, token = _first_greatest(found, first, mask)
    tl.store(out + row, token.to(tl.int64))
