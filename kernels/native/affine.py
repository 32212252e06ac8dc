"""Affine: whole numbers that follow from a few sizes by a sum of multiples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

Sizes: TypeAlias = tuple[int, ...]  # K numbers that a computation may change between two runs


def with_steps(base: Sizes) -> list[Sizes]:
    """The K + 1 sizes from which an `Affine` is told: the base, and one more of each in turn."""
    return [
        base,
        *(tuple(n + (i == k) for i, n in enumerate(base)) for k in range(len(base))),
    ]


@dataclass(frozen=True, eq=False)
class Affine:
    """N numbers, each c0 + c1 * s1 + ... + cK * sK at the sizes (s1, ..., sK)."""

    coefficients: NDArray[np.int64]  # [N, 1 + K]

    @classmethod
    def through(cls, base: Sizes, numbers: Sequence[Sequence[int]]) -> Self:
        """From the N numbers at each of the sizes of `with_steps(base)`."""
        first, *others = np.array(numbers, np.int64).reshape(len(base) + 1, -1)
        slopes = np.stack([other - first for other in others], axis=1) if others else None
        if slopes is None:
            return cls(first[:, None])
        constants = first - slopes @ np.array(base, np.int64)
        return cls(np.column_stack((constants, slopes)))

    def at(self, sizes: Sizes) -> NDArray[np.int64]:
        """-> [N]"""
        return self.coefficients @ np.array((1, *sizes), np.int64)

    def plus(self, constants: NDArray[np.int64]) -> "Affine":
        """Each number with a constant [N] added."""
        moved = self.coefficients.copy()
        moved[:, 0] += constants
        return Affine(moved)

    def select(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> "Affine":
        """Some of the numbers, by place or by mask."""
        return Affine(self.coefficients[which])

    @property
    def varies(self) -> NDArray[np.bool_]:
        """[N] whether a number depends on the sizes."""
        return np.asarray(self.coefficients[:, 1:].any(axis=1))
