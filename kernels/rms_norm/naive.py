"""Root mean square normalisation in plain torch: the oracle of the faster kernels.

Models differ in where they round: before the multiplication by the weight, or after it only.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] float32 -> [..., D] in the dtype of x, rounded once at the end."""
    return (weight * _normalised(x, eps)).to(x.dtype)


def rms_norm_rounding_first(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `rms_norm`, but what is multiplied is in the dtype of x already."""
    return weight.to(x.dtype) * _normalised(x, eps).to(x.dtype)


def _normalised(x: Tensor, eps: float) -> Tensor:
    """float32"""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
