"""Log-probabilities in OpenAI's two shapes and in vLLM's; always finite numbers."""

import math
from collections.abc import Iterable
from typing import Any

from loraplex.engine import protocol
from loraplex.platform.inference.generation import Prompt
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
    if token.text or not token.bytes:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)


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
    positions: Iterable[protocol.PositionLogprobs | None], prompt: Prompt, offset: int
) -> tuple[CompletionLogprobs, int]:
    """The parallel lists of the older route, and the offset at which they end.

    Args:
        positions: None stands for the prompt's first token, which nothing predicts.
        offset: how many characters the choice's tokens before these have.
    """
    result = CompletionLogprobs([], [], [], [])
    for position in positions:
        result.text_offset.append(offset)
        if position is None:
            result.tokens.append(prompt.first_token)
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            is_shown = prompt.text.startswith(prompt.first_token)
            offset += len(prompt.first_token) if is_shown else 0
        else:
            result.tokens.append(token_text(position.chosen))
            result.token_logprobs.append(finite(position.chosen.logprob))
            result.top_logprobs.append(_by_text(position))
            offset += len(position.chosen.text)
    return result, offset


def prompt_logprobs(
    positions: Iterable[protocol.PositionLogprobs | None] | None,
) -> PromptLogprobs | None:
    if positions is None:
        return None
    return [None if position is None else _by_id(position) for position in positions]


def _by_text(position: protocol.PositionLogprobs) -> dict[str, float]:
    best: dict[str, float] = {}
    for token in (*position.top, position.chosen):
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
        for token in (*position.top, position.chosen)
    }
