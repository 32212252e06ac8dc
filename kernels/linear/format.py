"""LinearFormat: how the weights of linear layers are stored, and what multiplies by them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from loraplex.kernels.native.huge_pages import HugePages


class KeptWeight(Protocol):
    """A weight [N, K] in some format."""

    def unpack(self) -> Tensor:
        """Returns [N, K], read-only; where the format rounds, what is left of the weight."""

    def rows(self, ids: Tensor) -> Tensor:
        """ids [...] int64 below N -> [..., K]: rows of the weight, as an embedding."""


@dataclass(frozen=True)
class LinearFormat:
    """A format for weights, activations and results in one of its dtypes.

    A row of a product does not depend on how many rows are multiplied beside it.
    """

    dtypes: tuple[torch.dtype, ...]
    pack: Callable[[Tensor, HugePages], KeptWeight]  # [N, K]; the second: where there is room
    linear: Callable[[Tensor, Any, Tensor | None], Tensor]  # x [..., K], weight, bias [N] float32
    num_bytes: Callable[[Tensor], int]  # of those pages that a weight [N, K] takes
