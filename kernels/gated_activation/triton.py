"""The gated activations of feed-forward layers in Triton."""

import torch
import triton
from torch import Tensor

from loraplex.kernels.gated_activation.triton_kernels import gated_kernel

_COLUMNS = 1024  # of a program
_WARPS = 4


def gated_silu(gate_up: Tensor) -> Tensor:
    """As `naive.gated_silu`."""
    return _run(gate_up, is_gelu=False)


def gated_gelu_tanh(gate_up: Tensor) -> Tensor:
    """As `naive.gated_gelu_tanh`."""
    return _run(gate_up, is_gelu=True)


def _run(gate_up: Tensor, *, is_gelu: bool) -> Tensor:
    width = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    rows = gate_up.reshape(-1, 2 * width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    gated_kernel[(rows.shape[0], triton.cdiv(width, _COLUMNS))](
        rows,
        out,
        width,
        rows.stride(0),
        IS_GELU=is_gelu,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
        num_stages=1,
    )
    return out
