"""Draws tokens from logits, in plain torch: the oracle of the faster kernels."""

from dataclasses import replace

import torch
from torch import Tensor

from loraplex.kernels.draw.settings import DrawSettings

_AT_ONCE = 1 << 22  # numbers of draws times vocabulary; each takes about 80 bytes on the way
_WORD = 0xFFFFFFFF


def draw(logits: Tensor, rows: Tensor, settings: DrawSettings, keys: Tensor) -> Tensor:
    """Draws one token for each of D draws: the greatest of logit / temperature + Gumbel noise.

    The noise is a hash of the draw's key and the token, so that the same key gives the same token
    whatever else is drawn beside it, and near distributions mostly give the same. A token of
    probability 0 is never drawn while there is another.

    Args:
        logits: [R, V], any float dtype; -inf where a token cannot be drawn.
        rows: [D] int64, the row of logits of each draw.
        settings: of each draw.
        keys: [D] int64, the randomness; see `draw_key`.

    Returns:
        [D] int64 token ids.
    """
    step = max(1, _AT_ONCE // logits.shape[1])
    parts = [slice(start, start + step) for start in range(0, len(rows), step)]
    tokens = [_draw(logits, rows[part], _some(settings, part), keys[part]) for part in parts]
    return torch.cat(tokens) if tokens else rows.new_empty(0)


def _some(settings: DrawSettings, part: slice) -> DrawSettings:
    return replace(
        settings,
        temperature=settings.temperature[part],
        top_k=settings.top_k[part],
        top_p=settings.top_p[part],
        min_p=settings.min_p[part],
    )


def _draw(logits: Tensor, rows: Tensor, settings: DrawSettings, keys: Tensor) -> Tensor:
    """Draws by a race: with e exponentially distributed, the least e / p is the greatest log p +
    Gumbel noise."""
    probs = distribution(logits, rows, settings)
    times = -torch.log1p(-noise(keys, logits.shape[1])) / probs
    return times.masked_fill(probs == 0.0, float("inf")).argmin(-1)


def noise(keys: Tensor, size: int) -> Tensor:
    """keys [D] int64 -> [D, size] float64 in (0, 1), one for each token.

    A hash of 32-bit words that changes every bit with every other (C. Wellons' triple32), of the
    token plus one half of the key, with the other half mixed in on the way.
    """
    x = torch.arange(size, device=keys.device) + (keys & _WORD)[:, None] & _WORD
    x = (x ^ x >> 17) * 0xED5AD4BB & _WORD ^ (keys >> 32 & _WORD)[:, None]
    x = (x ^ x >> 11) * 0xAC4C1B51 & _WORD
    x = (x ^ x >> 15) * 0x31848BAB & _WORD
    return ((x ^ x >> 14).double() + 0.5) * 2.0**-32


def distribution(logits: Tensor, rows: Tensor, settings: DrawSettings) -> Tensor:
    """-> [D, V] float64: how likely each token is, not normalised; 0 for those that are cut.

    The temperature comes first, then top-k, then top-p over what is left, then min-p. Tokens that
    are equally likely are cut together or not at all.
    """
    wide = logits[rows].double()
    wide = (wide - wide.amax(-1, keepdim=True)) / settings.temperature.double()[:, None]
    probs = wide.exp()  # of the likeliest token: 1
    least = settings.min_p.double()[:, None]
    if settings.has_cuts:
        falling = probs.sort(-1, descending=True).values
        top_k = _top_k_limit(falling, settings.top_k)
        falling = falling.masked_fill(falling < top_k, 0.0)
        least = torch.maximum(least, torch.maximum(top_k, _top_p_limit(falling, settings.top_p)))
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
