"""Affine: whole numbers that are affine functions of a few sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import torch
from torch import Tensor

Sizes: TypeAlias = tuple[int, ...]  # K numbers that a computation may change between two runs


def with_steps(base: Sizes) -> list[Sizes]:
    """Returns the K + 1 sizes that determine an `Affine`: the base, and one more of each in
    turn."""
    more = [tuple(n + (i == k) for i, n in enumerate(base)) for k in range(len(base))]
    return [base, *more]


@dataclass(frozen=True, eq=False)
class Affine:
    """N numbers, each c0 + c1 * s1 + ... + cK * sK at the sizes (s1, ..., sK)."""

    coefficients: Tensor  # [N, 1 + K] int64

    @classmethod
    def through(cls, base: Sizes, numbers: Sequence[Sequence[int]]) -> Self:
        """Fits the N numbers at each of the sizes of `with_steps(base)`."""
        known = torch.tensor(numbers, dtype=torch.int64).reshape(len(base) + 1, -1)
        slopes = (known[1:] - known[0]).t()  # [N, K]
        constants = known[0] - (slopes * torch.tensor(base, dtype=torch.int64)).sum(dim=1)
        return cls(torch.cat((constants[:, None], slopes), dim=1))

    def at(self, sizes: Sizes) -> Tensor:
        """-> [N] int64"""
        return self.coefficients @ torch.tensor((1, *sizes))

    def plus(self, constants: Tensor) -> "Affine":
        """Adds a constant [N] to each number."""
        moved = self.coefficients.clone()
        moved[:, 0] += constants
        return Affine(moved)

    def select(self, which: Tensor) -> "Affine":
        """Selects some of the numbers, by place or by mask."""
        return Affine(self.coefficients[which])

    @property
    def varies(self) -> Tensor:
        """Returns [N] whether a number depends on the sizes."""
        return (self.coefficients[:, 1:] != 0).any(dim=1)
