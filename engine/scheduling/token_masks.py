"""token_masks: the tokens that a request allows in its next rows of logits."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loraplex.engine.sampling_params import SamplingParams


def token_masks(
    params: SamplingParams, output: Sequence[int], drafts: Sequence[int], vocab_size: int
) -> NDArray[np.uint8] | None:
    """
    Args:
        output: token ids so far.
        drafts: that come next, where they are right.

    Returns:
        [1 + drafts, ceil(vocab_size / 8)] allowed tokens, low bits first; None: all are.
    """
    if params.allowed_token_ids is None and not params.bad_token_sequences:
        return None
    allowed = _allowed(params.allowed_token_ids, vocab_size)
    rows = []
    for num_before in range(1 + len(drafts)):
        row = allowed.copy()
        row[_banned(params.bad_token_sequences, [*output, *drafts[:num_before]])] = False
        # A ban that leaves nothing is one that cannot be kept.
        rows.append(np.packbits(row if row.any() else allowed, bitorder="little"))
    return np.stack(rows)


def _allowed(token_ids: Sequence[int] | None, vocab_size: int) -> NDArray[np.bool_]:
    if token_ids is None:
        return np.ones(vocab_size, np.bool_)
    allowed = np.zeros(vocab_size, np.bool_)
    allowed[list(token_ids)] = True
    return allowed


def _banned(sequences: Sequence[tuple[int, ...]], output: list[int]) -> list[int]:
    """Returns the tokens that would end one of the sequences."""
    return [
        last
        for *before, last in sequences
        if len(before) <= len(output) and output[len(output) - len(before) :] == before
    ]
