"""The weights that a LoRA kernel takes: one adapter's share of one, possibly fused, linear."""

from typing import NamedTuple

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
