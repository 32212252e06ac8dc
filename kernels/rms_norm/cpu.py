"""Root mean square normalisation in native code, for float32 and bfloat16."""

from array import array

import torch
from torch import Tensor

from loraplex.kernels.native.library import launch, num_threads
from loraplex.kernels.rms_norm.rows import three_dimensional

_GRAIN = 64 * 1024  # numbers worth a thread


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `naive.rms_norm`; the result is contiguous."""
    return _run(x, weight, eps, round_first=False)


def rms_norm_rounding_first(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `naive.rms_norm_rounding_first`; the result is contiguous."""
    return _run(x, weight, eps, round_first=True)


def _run(x: Tensor, weight: Tensor, eps: float, *, round_first: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    rows = x
    if rows.dim() != 3 or rows.stride(2) != 1:
        rows = three_dimensional(rows)
    outer, inner, columns = rows.shape
    sizes = array("q", (outer, inner, columns, rows.stride(0), rows.stride(1)))
    kernel = "lpx_rms_norm_float" if x.dtype == torch.float32 else "lpx_rms_norm_bf16"
    launch(
        kernel,
        rows,
        weight,
        out,
        eps,
        sizes,
        round_first,
        num_threads(out.numel(), _GRAIN),
    )
    return out
