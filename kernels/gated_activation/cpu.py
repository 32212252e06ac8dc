"""The gated activations of feed-forward layers in native code, for float32 and bfloat16."""

import torch
from torch import Tensor

from loraplex.kernels.native.library import launch, num_threads

_GRAIN = 32 * 1024  # numbers worth a thread


def gated_silu(gate_up: Tensor) -> Tensor:
    """As `naive.gated_silu`, rounded once at the end."""
    is_wide = gate_up.dtype == torch.float32
    return _run("lpx_gated_silu_float" if is_wide else "lpx_gated_silu_bf16", gate_up)


def gated_gelu_tanh(gate_up: Tensor) -> Tensor:
    """As `naive.gated_gelu_tanh`, rounded once at the end."""
    is_wide = gate_up.dtype == torch.float32
    return _run("lpx_gated_gelu_tanh_float" if is_wide else "lpx_gated_gelu_tanh_bf16", gate_up)


def _run(kernel: str, gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype)
    launch(
        kernel,
        gate_up,
        out,
        out.numel() // width,
        width,
        num_threads(out.numel(), _GRAIN),
    )
    return out
