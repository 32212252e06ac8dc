"""The Triton kernel of gated activations; `triton.py` launches it."""

import triton
import triton.language as tl

_GELU_SCALE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_GELU_CUBE = tl.constexpr(0.044715)


@triton.jit
def gated_kernel(
    gate_up,  # [N, 2 width], the last dimension contiguous
    out,  # [N, width], contiguous
    width,
    row_stride,
    IS_GELU: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < width
    gates = gate_up + row * row_stride + column
    gate = tl.load(gates, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gates + width, mask=mask, other=0.0).to(tl.float32)
    logit = gate
    if IS_GELU:  # (1 + tanh(a)) / 2 is the logistic function of 2 a
        logit = _GELU_SCALE * (gate + _GELU_CUBE * gate * gate * gate)
    activated = (gate / (1.0 + tl.exp(-logit))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, (activated * up).to(out.dtype.element_ty), mask=mask)
