"""A linear layer with eight-bit weights and activations, in plain torch: the oracle of faster ones.

Weights are rounded symmetrically with one scale for each output column, activations when they come,
with one scale for each row and group of inputs (as in ZeroQuant, arXiv 2206.01861, there by row).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from loraplex.kernels.linear.format import LinearFormat

GROUP = 64  # inputs whose activations share a scale


def quantise(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] -> integers from -127 to 127 [..., K] float32, their scales [..., 1] float32.

    A scale is NaN where not all numbers are finite.
    """
    wide = numbers.float()
    peak = wide.abs().amax(-1, keepdim=True)
    greatest = torch.tensor(127.0)  # a tensor, since torch divides a number by one less exactly
    inverse = torch.where(peak > 0, greatest / peak, 0.0)
    scales = torch.where(peak.isfinite(), peak / greatest, torch.nan)
    return (wide * inverse).round().nan_to_num(0.0), scales


@dataclass(frozen=True)
class Int8Weight:
    """A weight [N, K] as integers and scales."""

    integers: Tensor  # [N, K] int8
    scales: Tensor  # [N, 1] float32

    @classmethod
    def pack(cls, weight: Tensor) -> "Int8Weight":
        """Rounds a weight [N, K] of any float dtype."""
        integers, scales = quantise(weight)
        return cls(integers.to(torch.int8), scales)

    def unpack(self) -> Tensor:
        """-> [N, K] bfloat16: what the integers stand for."""
        return (self.integers * self.scales).bfloat16()

    def rows(self, ids: Tensor) -> Tensor:
        """ids [...] int64 below N -> [..., K] bfloat16: rows of the weight, as an embedding."""
        return (self.integers[ids] * self.scales[ids]).bfloat16()


def linear(x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """x [..., K] bfloat16, bias [N] float32 -> [..., N] bfloat16.

    Products of a group are summed exactly, and the groups in float32.
    """
    integers, scales = quantise(_groups(x))
    wide = _groups(weight.integers.double())
    sums = torch.einsum("...gk,ngk->...gn", integers.double(), wide).float()
    out = (sums * scales).sum(-2) * weight.scales[:, 0]
    return (out if bias is None else out + bias).bfloat16()


def _groups(numbers: Tensor) -> Tensor:
    """[..., K] -> [..., ceil(K / 64), 64], with zeros at the end."""
    padded = functional.pad(numbers, (0, -numbers.shape[-1] % GROUP))
    return padded.reshape(*padded.shape[:-1], padded.shape[-1] // GROUP, GROUP)


FORMAT = LinearFormat(
    (torch.bfloat16,), lambda weight, _: Int8Weight.pack(weight), linear, lambda _: 0
)
