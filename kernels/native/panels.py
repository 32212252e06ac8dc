"""Weights in the order in which native matrix products read them: panels of 32 rows."""

import torch
from torch import Tensor

PANEL = 32  # rows of a weight, that is output columns, that lie together


def pack_panels(weight: Tensor) -> Tensor:
    """[N, K] float32 or bfloat16 -> [ceil(N / 32), ceil(K / step), 32, step], zeros for padding.

    `step` numbers of a row lie together: two of bfloat16, one of float32.
    """
    rows, columns = weight.shape
    step = 4 // weight.element_size()
    num_panels, steps = -(-rows // PANEL), -(-columns // step)
    panels = weight.new_empty(num_panels, steps, PANEL, step)
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
