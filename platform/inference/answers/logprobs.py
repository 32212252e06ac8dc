"""Log-probabilities in OpenAI's two shapes and in vLLM's, always as finite numbers."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from loraplex.engine import protocol
from loraplex.platform.inference.answers.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot express


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST


def token_text(token: protocol.TokenLogprob, as_id: bool = False) -> str:
    """Returns the token's text or, for a part of a character, its bytes in OpenAI's notation."""
    if as_id:
        return id_text(token.token_id)
    try:
        bytes(token.bytes).decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)
    return token.text


def id_text(token_id: int) -> str:
    """Returns a token's id as a text."""
    return f"token_id:{token_id}"


def chat_logprobs(
    positions: Iterable[protocol.PositionLogprobs], as_ids: bool = False
) -> ChatLogprobs:
    return ChatLogprobs(
        [
            TokenLogprob(
                token=token_text(position.chosen, as_ids),
                logprob=finite(position.chosen.logprob),
                bytes=position.chosen.bytes,
                top_logprobs=[
                    TopLogprob(token_text(token, as_ids), finite(token.logprob), token.bytes)
                    for token in _chosen_first(position)
                ],
            )
            for position in positions
        ]
    )


def _chosen_first(position: protocol.PositionLogprobs) -> list[protocol.TokenLogprob]:
    """Returns the sampled token and then the likeliest others; none if none were asked for."""
    others = [token for token in position.top if token.token_id != position.chosen.token_id]
    return [position.chosen, *others] if position.top else []


def completion_logprobs(
    positions: Sequence[protocol.PositionLogprobs | None],
    offsets: Sequence[int],
    first_token: str,
    as_ids: bool = False,
) -> CompletionLogprobs:
    """Returns the parallel lists of the older route.

    Args:
        positions: None stands for the prompt's first token, which nothing predicts.
        offsets: where in the text each token begins.
        first_token: text of the prompt's first token.
        as_ids: whether tokens are shown by their ids.
    """
    chosen = [None if position is None else position.chosen for position in positions]
    return CompletionLogprobs(
        tokens=[first_token if token is None else token_text(token, as_ids) for token in chosen],
        token_logprobs=[None if token is None else finite(token.logprob) for token in chosen],
        top_logprobs=[None if it is None else _by_text(it, as_ids) for it in positions],
        text_offset=list(offsets),
    )


def prompt_logprobs(
    positions: Iterable[protocol.PositionLogprobs | None] | None,
) -> PromptLogprobs | None:
    if positions is None:
        return None
    return [None if position is None else _by_id(position) for position in positions]


def _by_text(position: protocol.PositionLogprobs, as_ids: bool) -> dict[str, float]:
    best: dict[str, float] = {}
    for token in (position.chosen, *position.top):
        text = token_text(token, as_ids)
        best[text] = max(finite(token.logprob), best.get(text, LOWEST))
    return best


def _by_id(position: protocol.PositionLogprobs) -> dict[int, dict[str, Any]]:
    return {
        token.token_id: {
            "logprob": finite(token.logprob),
            "rank": token.rank,
            "decoded_token": token.text,
        }
        for token in (position.chosen, *position.top)
    }
