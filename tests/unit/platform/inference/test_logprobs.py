"""Log-probabilities for strict clients: finite, aligned, and readable where text is cut."""

import math

import msgspec
import pytest

from loraplex.engine.protocol import PositionLogprobs, TokenLogprob
from loraplex.platform.inference.generation import Prompt
from loraplex.platform.inference.logprobs import (
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)

PROMPT = Prompt(token_ids=[0, 5], text="hello", first_token="<s>")


def token(token_id: int, text: str, logprob: float, raw: bytes | None = None) -> TokenLogprob:
    utf8 = list(text.encode() if raw is None else raw)
    return TokenLogprob(token_id=token_id, logprob=logprob, text=text, bytes=utf8, rank=1)


def position(*tokens: TokenLogprob) -> PositionLogprobs:
    return PositionLogprobs(chosen=tokens[0], top=list(tokens))


@pytest.mark.parametrize("logprob", [-math.inf, math.nan])
def test_what_json_cannot_say_becomes_a_low_number(logprob: float) -> None:
    positions = [position(token(1, "a", -0.5), token(2, "b", logprob))]

    shown = [
        chat_logprobs(positions),
        completion_logprobs(positions, PROMPT, 0),
        prompt_logprobs(positions),
    ]

    text = msgspec.json.encode(shown).decode()
    assert "null" not in text.replace('"refusal":null', "")
    assert text.count("-9999.0") == 3


def test_parts_of_a_character_are_shown_as_bytes_and_do_not_collide() -> None:
    positions = [position(token(7, "", -1.0, b"\xf0\x9f"), token(8, "", -2.0, b"\xe2"))]

    logprobs, end = completion_logprobs(positions, PROMPT, 3)

    assert logprobs.tokens == ["bytes:\\xf0\\x9f"]
    assert logprobs.top_logprobs == [{"bytes:\\xf0\\x9f": -1.0, "bytes:\\xe2": -2.0}]
    assert (logprobs.text_offset, end) == ([3], 3)


def test_offsets_are_places_in_the_text() -> None:
    positions = [None, position(token(5, "hello", -1.0)), position(token(6, " you", -1.0))]

    logprobs, end = completion_logprobs(positions, PROMPT, 0)

    assert logprobs.tokens == ["<s>", "hello", " you"]
    assert logprobs.token_logprobs == [None, -1.0, -1.0]
    assert logprobs.text_offset == [0, 0, 5]  # the first token is no part of the echoed text
    assert end == 9


def test_two_tokens_of_the_same_text_keep_the_likelier_one() -> None:
    positions = [position(token(1, "a", -3.0), token(2, "a", -1.0))]

    logprobs, _ = completion_logprobs(positions, PROMPT, 0)

    assert logprobs.top_logprobs == [{"a": -1.0}]
