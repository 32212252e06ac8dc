"""The weights that a LoRA kernel takes: one adapter's part of one, possibly fused, linear."""

from typing import NamedTuple, Protocol

import torch


class LoRASlice(NamedTuple):
    """One adapted member of a fused linear: a range of its output columns."""

    start: int  # the first output column
    b: torch.Tensor  # [width, rank]
    scaling: float


class LoRAOperand(NamedTuple):
    """One adapter on one linear. Slices may differ in rank and width; columns may be left out."""

    a: torch.Tensor  # [sum of the slices' ranks, in], or [.., vocabulary] for an embedding
    slices: tuple[LoRASlice, ...]


class LoRATable(Protocol):
    """The adapters of one linear by slot, as a kernel reads them. The content of slots may change
    between launches; the place of the table does not."""

    def set(self, slot: int, operand: LoRAOperand | None) -> None:
        """Puts an adapter's weights into a slot, or None to empty it."""
