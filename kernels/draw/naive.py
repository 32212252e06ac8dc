"""Draws tokens from logits, in plain torch: the oracle of the faster kernels."""

import torch
from torch import Tensor

from loraplex.kernels.draw.settings import DrawSettings


def draw(logits: Tensor, rows: Tensor, settings: DrawSettings, points: Tensor) -> Tensor:
    """Draws one token for each of D draws, by the inverse of its distribution function.

    The same point gives the same token whatever else is drawn beside it.

    Args:
        logits: [R, V], any float dtype; -inf where a token cannot be drawn.
        rows: [D] int64, the row of logits of each draw.
        settings: of each draw.
        points: [D] float64 in [0, 1), the randomness.

    Returns:
        [D] int64 token ids.
    """
    probs = distribution(logits, rows, settings)
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    chosen = torch.searchsorted(cumulative, points[:, None] * total, right=True)
    last = torch.searchsorted(cumulative, total)  # that can be drawn at all
    return torch.minimum(chosen, last)[:, 0].clamp_max(logits.shape[1] - 1)


def distribution(logits: Tensor, rows: Tensor, settings: DrawSettings) -> Tensor:
    """-> [D, V] float64: how likely each token is, not normalised; 0 for those that are cut.

    The temperature comes first, then top-k, then top-p over what is left, then min-p. Tokens that
    are equally likely are cut together or not at all.
    """
    wide = logits[rows].double()
    wide = (wide - wide.amax(-1, keepdim=True)) / settings.temperature.double()[:, None]
    probs = wide.exp()  # of the likeliest token: 1
    falling = probs.sort(-1, descending=True).values
    least = _top_k_limit(falling, settings.top_k)
    falling = falling.masked_fill(falling < least, 0.0)
    least = torch.maximum(least, _top_p_limit(falling, settings.top_p))
    least = torch.maximum(least, settings.min_p.double()[:, None])
    return probs.masked_fill(probs < least, 0.0)


def _top_k_limit(falling: Tensor, top_k: Tensor) -> Tensor:
    """-> [D, 1]: the k-th largest of [D, V]."""
    size = falling.shape[1]
    last = torch.where(top_k > 0, top_k, size).clamp_max(size) - 1
    return falling.gather(1, last[:, None])


def _top_p_limit(falling: Tensor, top_p: Tensor) -> Tensor:
    """-> [D, 1]: the smallest probability above which less than the share top_p of all lies."""
    above = falling.cumsum(-1) - falling
    first_equal = torch.searchsorted(-falling, -falling).clamp_max(falling.shape[1] - 1)
    above = above.gather(1, first_equal)
    share = top_p.double()[:, None]
    inside = (above < share * falling.sum(-1, keepdim=True)) | (share >= 1.0)
    return falling.masked_fill(~inside, float("inf")).amin(-1, keepdim=True)
