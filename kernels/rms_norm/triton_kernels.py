"""The Triton kernel of root mean square normalisation; `triton.py` launches it."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "inner"])
def rms_norm_kernel(
    x,  # [outer, inner, width], the last dimension contiguous
    weight,  # [width] float32
    out,  # [outer * inner, width], contiguous
    eps,
    num_rows,
    inner,
    width,
    x_outer,
    x_inner,
    ROUND_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    is_column = column < width
    mask = (row < num_rows)[:, None] & is_column[None, :]
    places = row // inner * x_outer + row % inner * x_inner
    wide = tl.load(x + places[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=is_column, other=0.0)
    mean = tl.sum(wide * wide, axis=1) / width
    normalised = wide * tl.rsqrt(mean + eps)[:, None]
    if ROUND_FIRST:
        normalised = normalised.to(out.dtype.element_ty).to(tl.float32)
        scale = scale.to(out.dtype.element_ty).to(tl.float32)
    result = (scale[None, :] * normalised).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * width + column[None, :], result, mask=mask)
