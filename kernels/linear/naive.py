"""A linear layer in plain torch: the oracle that faster implementations are tested against."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from loraplex.kernels.linear.format import LinearFormat

TILE = 16  # rows of one product on a CPU


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K], weight [N, K], bias [N] -> [..., N] in the dtype of x.

    On a CPU a row's bits do not depend on the rows beside it: a library of matrix products takes
    another order of sums for another number of rows, so that it always gets the same number.
    """
    if bias is not None:
        bias = bias.to(x.dtype)
    if x.device.type != "cpu":
        return functional.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    out = torch.cat([functional.linear(tile, weight, bias) for tile in tiles(rows)])
    return out[: rows.shape[0]].reshape(*x.shape[:-1], weight.shape[0])


def tiles(rows: Tensor) -> tuple[Tensor, ...]:
    """[T, K] -> at least one [TILE, K], the last one padded with zeros."""
    padding = TILE if rows.shape[0] == 0 else -rows.shape[0] % TILE
    padded = functional.pad(rows, (0, 0, 0, padding))
    return tuple(padded[start : start + TILE] for start in range(0, len(padded), TILE))


@dataclass(frozen=True)
class PlainWeight:
    """A weight [N, K] as it is."""

    weight: Tensor

    def unpack(self) -> Tensor:
        """-> [N, K], the weight itself."""
        return self.weight

    def rows(self, ids: Tensor) -> Tensor:
        """ids [...] int64 below N -> [..., K]: rows of the weight, as an embedding."""
        return functional.embedding(ids, self.weight)


FORMAT = LinearFormat(
    (torch.float32, torch.bfloat16, torch.float16),
    lambda weight, _: PlainWeight(weight.clone()),  # not a view of a file that it was read from
    lambda x, kept, bias: linear(x, kept.weight, bias),
    lambda _: 0,
)
