"""Log-probabilities in OpenAI's two shapes and in vLLM's; always finite numbers."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from loraplex.engine import protocol
from loraplex.platform.inference.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot say


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST


def token_text(token: protocol.TokenLogprob) -> str:
    """The token's text; for a part of a character, its bytes in OpenAI's notation."""
    try:
        bytes(token.bytes).decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)
    return token.text


def chat_logprobs(positions: Iterable[protocol.PositionLogprobs]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            TokenLogprob(
                token=token_text(position.chosen),
                logprob=finite(position.chosen.logprob),
                bytes=position.chosen.bytes,
                top_logprobs=[
                    TopLogprob(token_text(token), finite(token.logprob), token.bytes)
                    for token in position.top
                ],
            )
            for position in positions
        ]
    )


def completion_logprobs(
    positions: Sequence[protocol.PositionLogprobs | None], offsets: Sequence[int], first_token: str
) -> CompletionLogprobs:
    """The parallel lists of the older route.

    Args:
        positions: None stands for the prompt's first token, which nothing predicts.
        offsets: where in the text each of the tokens begins.
    """
    chosen = [None if position is None else position.chosen for position in positions]
    return CompletionLogprobs(
        tokens=[first_token if token is None else token_text(token) for token in chosen],
        token_logprobs=[None if token is None else finite(token.logprob) for token in chosen],
        top_logprobs=[None if position is None else _by_text(position) for position in positions],
        text_offset=list(offsets),
    )


def prompt_logprobs(
    positions: Iterable[protocol.PositionLogprobs | None] | None,
) -> PromptLogprobs | None:
    if positions is None:
        return None
    return [None if position is None else _by_id(position) for position in positions]


def _by_text(position: protocol.PositionLogprobs) -> dict[str, float]:
    best: dict[str, float] = {}
    for token in (position.chosen, *position.top):
        text = token_text(token)
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
