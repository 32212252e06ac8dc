"""Weights in the order in which native matrix products read them: panels of 32 rows."""

import torch
from torch import Tensor

PANEL = 32  # rows of a weight, that is output columns, that lie together


def panels_shape(rows: int, columns: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Returns the shape of a weight [rows, columns] in panels."""
    step = 4 // dtype.itemsize
    return -(-rows // PANEL), -(-columns // step), PANEL, step


def unpack_panels(panels: Tensor, shape: tuple[int, int]) -> Tensor:
    """-> [N, K]: a copy of the weight of this shape that was packed."""
    num_panels, steps, _, step = panels.shape
    whole = panels.transpose(1, 2).reshape(num_panels * PANEL, steps * step)
    return torch.clone(whole[: shape[0], : shape[1]], memory_format=torch.contiguous_format)
