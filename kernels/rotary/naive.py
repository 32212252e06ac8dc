"""Rotary position embeddings in plain torch: the oracle of the faster kernels."""

import torch
from torch import Tensor


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turns the first R numbers of each head by its token's angles; the others pass as they are.

    The number pairs are (d, d + R / 2). Every product and every sum is rounded to the dtype.

    Args:
        query: [1, H, T, D], any float dtype.
        key: [1, KVH, T, D], in the dtype of `query`, as are `cos` and `sin`.
        cos: [1, T, R] of the angles, both halves alike; R is even and at most D.
        sin: [1, T, R].

    Returns:
        The turned query and key, in their shapes.

    Source:
        Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), with the
        pairs as in GPT-NeoX.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [1, H, T, D], cos and sin [1, 1, T, R] -> [1, H, T, D]."""
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    lower, upper = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-upper, lower], dim=-1) * sin
    return turned if rest.shape[-1] == 0 else torch.cat([turned, rest], dim=-1)
