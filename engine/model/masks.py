"""MaskProbe: finds out how far back a model's masks let a token look."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import eager_mask

from loraplex.engine.errors import UnsupportedModel

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of batch, head, query, key


class MaskProbe:
    """Makes the masks of one dry forward, and records what each would show to a long sequence.

    Args:
        longest: tokens of the longest sequence that will be served.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._windows: list[tuple[Tensor, int | None]] = []

    def __call__(self, *, mask_function: MaskFunction, **options: Any) -> Tensor:
        """Called by transformers in place of its own mask function.

        Returns:
            [batch, 1, queries, keys], to be added to the scores.
        """
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask: Tensor = eager_mask(mask_function=mask_function, **options)
        with suppress(IndexError):  # of one that looks at this pass's tokens, not at positions only
            self._windows.append((mask, self._window(mask_function)))
        return mask

    def window(self, mask: Tensor | None, option: int | None) -> int | None:
        """Returns how many tokens a layer attends to, its own included; None: all before it.

        Args:
            mask: what the layer was given.
            option: the window that the layer names.

        Raises:
            UnsupportedModel: the mask is neither causal nor sliding.
        """
        for made, window in self._windows:
            if mask is made:
                return window
        if mask is not None and not _is_causal(mask, option):
            raise UnsupportedModel("a layer makes an attention mask of its own")
        return option

    def _window(self, function: MaskFunction) -> int | None:
        last = self._longest - 1
        window = _count_visible(function, last)
        for position in {0, last // 2, last * 2 // 3, max(0, last - 1)}:
            if _count_visible(function, position) != min(window, position + 1):
                raise UnsupportedModel("its attention mask is neither causal nor a sliding window")
        return None if window > last else window


def _count_visible(function: MaskFunction, position: int) -> int:
    """Returns how many tokens the one at a position attends to, its own included and without
    gaps."""
    zero, keys = torch.tensor(0), torch.arange(position + 2)
    visible = function(zero, zero, torch.tensor(position), keys).cpu().expand(position + 2)
    count = int(visible.sum())
    if not visible[position + 1 - count : position + 1].all():
        raise UnsupportedModel("its attention mask is neither causal nor a sliding window")
    return count


def _is_causal(mask: Tensor, window: int | None) -> bool:
    """Returns whether a mask [..., T, T], of bools or of numbers to add, hides exactly what comes
    later or lies outside the window."""
    shown = mask if mask.dtype == torch.bool else mask == 0
    if shown.dim() < 2 or shown.shape[-1] != shown.shape[-2]:
        return False
    causal = torch.ones(shown.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    if window is not None:
        causal = causal.triu(1 - window)
    return not (shown != causal).any()
