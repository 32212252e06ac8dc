"""The rows of a tensor that is normalised over its last dimension."""

from torch import Tensor


def three_dimensional(x: Tensor) -> Tensor:
    """[..., D] -> [A, B, D] with contiguous rows; a view where x is one of a flat batch."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() == 4 and x.shape[0] == 1:
        return x[0]
    return x.reshape(1, -1, x.shape[-1])
