"""Rows so far apart that 32 bits do not count the numbers between the first and the third."""

import torch
from torch import Tensor

APART = 2**30 + 16  # each step fits into 32 bits, so that a launch is given it in 32 bits


def far_apart(rows: Tensor) -> Tensor:
    """[3, ...] copied to a CPU tensor in which a step along the first dimension is APART numbers.

    What lies between is never touched, so that it takes addresses and no memory.
    """
    inner = rows[0].numel()
    poisons = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        whole = torch.empty((len(rows) - 1) * APART + inner, dtype=rows.dtype)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = poisons
    far = whole.as_strided(rows.shape, (APART, *rows.contiguous().stride()[1:]))
    return far.copy_(rows)
