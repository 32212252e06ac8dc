"""Weights in the order in which native matrix products read them: panels of 32 rows."""

import torch
from torch import Tensor

from loraplex.kernels.native.huge_pages import HugePages

PANEL = 32  # rows of a weight, that is output columns, that lie together


def panels_shape(rows: int, columns: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """The shape of a weight [rows, columns] in panels."""
    step = 4 // dtype.itemsize
    return -(-rows // PANEL), -(-columns // step), PANEL, step


def pack_panels(weight: Tensor, memory: HugePages | None = None) -> Tensor:
    """[N, K] float32 or bfloat16 -> [ceil(N / 32), ceil(K / step), 32, step], zeros for padding.

    `step` numbers of a row lie together: two of bfloat16, one of float32.

    Args:
        memory: where to put the panels; None: anywhere.
    """
    rows, columns = weight.shape
    shape = panels_shape(rows, columns, weight.dtype)
    num_panels, steps, _, step = shape
    panels = memory.empty(*shape, dtype=weight.dtype) if memory else weight.new_empty(shape)
    whole = rows // PANEL if columns % step == 0 else 0
    if whole:  # most of a large weight is moved without a padded copy
        body = weight[: whole * PANEL].reshape(whole, PANEL, steps, step)
        panels[:whole] = body.transpose(1, 2)
    if whole < num_panels:
        rest = weight.new_zeros((num_panels - whole) * PANEL, steps * step)
        rest[: rows - whole * PANEL, :columns] = weight[whole * PANEL :]
        panels[whole:] = rest.view(-1, PANEL, steps, step).transpose(1, 2)
    return panels


def unpack_panels(panels: Tensor, shape: tuple[int, int]) -> Tensor:
    """-> [N, K]: a copy of the weight of this shape that was packed."""
    num_panels, steps, _, step = panels.shape
    whole = panels.transpose(1, 2).reshape(num_panels * PANEL, steps * step)
    return torch.clone(whole[: shape[0], : shape[1]], memory_format=torch.contiguous_format)
