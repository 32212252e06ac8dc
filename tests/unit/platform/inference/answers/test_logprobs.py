"""Log-probabilities for strict clients: finite, aligned, and readable where text is cut."""

import math

import msgspec
import pytest

from loraplex.engine.protocol import PositionLogprobs, TokenLogprob
from loraplex.platform.inference.answers.logprobs import (
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)


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
        completion_logprobs(positions, [0], ""),
        prompt_logprobs(positions),
    ]

    text = msgspec.json.encode(shown).decode()
    assert "null" not in text.replace('"refusal":null', "")
    assert text.count("-9999.0") == 3


def test_parts_of_a_character_are_shown_as_bytes_and_do_not_collide() -> None:
    positions = [position(token(7, "", -1.0, b"\xf0\x9f"), token(8, "", -2.0, b"\xe2"))]

    logprobs = completion_logprobs(positions, [3], "")

    assert logprobs.tokens == ["bytes:\\xf0\\x9f"]
    assert logprobs.top_logprobs == [{"bytes:\\xf0\\x9f": -1.0, "bytes:\\xe2": -2.0}]


def test_the_prompts_first_token_is_shown_though_nothing_predicts_it() -> None:
    positions = [None, position(token(5, "hello", -1.0)), position(token(6, " you", -1.0))]

    logprobs = completion_logprobs(positions, [0, 0, 5], "<s>")

    assert logprobs.tokens == ["<s>", "hello", " you"]
    assert logprobs.token_logprobs == [None, -1.0, -1.0]
    assert logprobs.text_offset == [0, 0, 5]


def test_the_chosen_token_comes_first_then_the_likeliest() -> None:
    likelier = [token(token_id, text, -0.1 * token_id) for token_id, text in ((1, "a"), (2, "b"))]
    positions = [PositionLogprobs(chosen=token(9, "z", -5.0), top=likelier)]

    logprobs = completion_logprobs(positions, [0], "")

    assert list(logprobs.top_logprobs[0] or {}) == ["z", "a", "b"]
    assert [list(by_id or {}) for by_id in prompt_logprobs(positions) or []] == [[9, 1, 2]]
    (shown,) = chat_logprobs(positions).content
    assert [other.token for other in shown.top_logprobs] == ["z", "a", "b"]


def test_a_chosen_token_among_the_likeliest_is_shown_once_and_only_where_any_are() -> None:
    a, b = token(1, "a", -0.1), token(2, "b", -0.2)
    positions = [PositionLogprobs(chosen=b, top=[a, b]), PositionLogprobs(chosen=b, top=[])]

    first, second = chat_logprobs(positions).content

    assert [other.token for other in first.top_logprobs] == ["b", "a"]
    assert second.top_logprobs == []


def test_two_tokens_of_the_same_text_keep_the_likelier_one() -> None:
    positions = [position(token(1, "a", -3.0), token(2, "a", -1.0))]

    logprobs = completion_logprobs(positions, [0], "")

    assert logprobs.top_logprobs == [{"a": -1.0}]
