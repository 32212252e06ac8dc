"""A linear layer in plain torch: the oracle that faster implementations are tested against."""

from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K], weight [N, K], bias [N] -> [..., N] in the dtype of x."""
    return functional.linear(x, weight, bias)
