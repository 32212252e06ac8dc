"""Root mean square normalisation in Triton."""

import torch
import triton
from torch import Tensor

from loraplex.kernels.rms_norm.rows import three_dimensional
from loraplex.kernels.rms_norm.triton_kernels import rms_norm_kernel

_TILE = 2048  # numbers of a program that takes several rows
_PER_WARP = 512


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `naive.rms_norm`; the result is contiguous."""
    return _run(x, weight, eps, round_first=False)


def rms_norm_rounding_first(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `naive.rms_norm_rounding_first`; the result is contiguous."""
    return _run(x, weight, eps, round_first=True)


def _run(x: Tensor, weight: Tensor, eps: float, *, round_first: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows = three_dimensional(x)
    outer, inner, width = rows.shape
    columns = triton.next_power_of_2(width)
    rows_each = max(1, _TILE // columns)
    rms_norm_kernel[(triton.cdiv(outer * inner, rows_each),)](
        rows,
        weight.contiguous(),
        out,
        eps,
        outer * inner,
        inner,
        width,
        rows.stride(0),
        rows.stride(1),
        ROUND_FIRST=round_first,
        ROWS=rows_each,
        COLUMNS=columns,
        num_warps=min(max(rows_each * columns // _PER_WARP, 1), 16),
        num_stages=1,
    )
    return out
