"""Staging: one stretch of memory through which a step's blocks pass."""

from collections.abc import Callable

import torch
from torch import Tensor


class Staging:
    """Blocks of several widths in one flat tensor, so that one copy moves them all."""

    def __init__(self, widths: list[int], make: Callable[[int], Tensor]) -> None:
        """`make` makes a flat tensor of so many numbers."""
        self._widths = widths
        self._make = make
        self._flat = make(0)

    def flat(self, num_blocks: int) -> Tensor:
        """The part that so many blocks take: valid until more are asked for."""
        needed = num_blocks * sum(self._widths)
        if len(self._flat) < needed:
            self._flat = self._make(max(needed, 2 * len(self._flat)))
        return self._flat[:needed]

    def parts(self, num_blocks: int) -> list[Tensor]:
        """The same as [C, E_j] for each width."""
        sizes = [num_blocks * width for width in self._widths]
        parts = torch.split(self.flat(num_blocks), sizes)
        return [part.view(num_blocks, -1) for part in parts]
