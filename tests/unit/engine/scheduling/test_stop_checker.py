"""What ends a sequence, and what its last text is."""

from typing import Any

import pytest
from support.engine.kv import MAX_MODEL_LEN, TOKENIZER
from support.engine.scheduling import generate_request
from support.models.word_tokenizer import EOS, WORDS

from loraplex.engine.protocol import FinishReason
from loraplex.engine.scheduling.stop_checker import StopChecker
from loraplex.engine.sequence import Sequence
from loraplex.engine.text.detokenizer import Detokenizer

THE, CAT, ICE = WORDS.index("the"), WORDS.index("cat"), WORDS.index("ice")


def generate(
    tokens: list[int], max_len: int = MAX_MODEL_LEN, **sampling: Any
) -> tuple[str, Sequence]:
    """Feeds tokens until one ends the sequence; returns the text and the sequence."""
    request = generate_request("r", [THE], **{"max_tokens": 99} | sampling)
    detokenizer = Detokenizer(
        TOKENIZER,
        [THE],
        stop=request.sampling.stop,
        include_stop=request.sampling.include_stop_str_in_output,
        skip_special_tokens=request.sampling.skip_special_tokens,
    )
    sequence = Sequence(request, detokenizer, seed=0, max_len=max_len)
    checker = StopChecker(frozenset({EOS}))
    text = ""
    for token in tokens:
        sequence.token_ids.append(token)
        text += checker.check(sequence)
        if sequence.finish_reason is not None:
            break
    return text, sequence


def end_of(sequence: Sequence) -> tuple[FinishReason | None, str | int | None, int]:
    return sequence.finish_reason, sequence.stop_reason, sequence.num_output_tokens


def test_the_models_end_token_ends_it_without_text() -> None:
    text, sequence = generate([CAT, EOS, CAT])

    assert (text, end_of(sequence)) == (" cat", (FinishReason.STOP, None, 2))


def test_the_models_end_token_is_ignored_where_that_is_asked_for() -> None:
    text, sequence = generate([CAT, EOS, CAT], ignore_eos=True)

    assert (text, sequence.finish_reason) == (" cat cat", None)


def test_a_stop_token_ends_it_and_is_named() -> None:
    text, sequence = generate([CAT, ICE, CAT], stop_token_ids=(ICE,))

    assert (text, end_of(sequence)) == (" cat", (FinishReason.STOP, ICE, 2))


def test_a_stop_string_ends_it_and_is_named() -> None:
    text, sequence = generate([CAT, ICE, CAT, ICE], stop=("e c",))

    assert (text, end_of(sequence)) == (" cat ic", (FinishReason.STOP, "e c", 3))


def test_the_length_ends_it() -> None:
    text, sequence = generate([CAT, ICE, CAT], max_tokens=2)

    assert (text, end_of(sequence)) == (" cat ice", (FinishReason.LENGTH, None, 2))


def test_the_context_ends_it() -> None:
    text, sequence = generate([CAT, ICE, CAT], max_len=3)

    assert (text, end_of(sequence)) == (" cat ice", (FinishReason.LENGTH, None, 2))


def test_an_end_at_the_last_allowed_token_is_a_stop() -> None:
    _, by_token = generate([CAT, EOS], max_tokens=2)
    _, by_string = generate([CAT, ICE], max_tokens=2, stop=("ice",))

    assert by_token.finish_reason is by_string.finish_reason is FinishReason.STOP


def test_what_was_held_back_comes_with_the_end() -> None:
    held = [
        generate(tokens, stop=("ice cat",), max_tokens=2)[0] for tokens in ([ICE, EOS], [ICE, ICE])
    ]

    assert held == [" ice", " ice ice"]


def test_a_stop_string_before_the_minimum_length_is_text() -> None:
    text, sequence = generate([CAT, ICE, CAT], stop=("cat",), min_tokens=2)

    assert (text, end_of(sequence)) == (" cat ice ", (FinishReason.STOP, "cat", 3))


@pytest.mark.parametrize(
    ("sampling", "ending"),
    [({}, {EOS}), ({"ignore_eos": True}, set()), ({"stop_token_ids": (ICE,)}, {EOS, ICE})],
)
def test_the_tokens_that_may_end_it(sampling: dict[str, Any], ending: set[int]) -> None:
    _, sequence = generate([], **sampling)

    assert StopChecker(frozenset({EOS})).ending_token_ids(sequence) == ending


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({}, " cat"),
        ({"include_stop_str_in_output": True}, " cat</s>"),
        ({"skip_special_tokens": False}, " cat "),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, " cat </s>"),
    ],
)
def test_a_stop_string_that_is_a_special_token_ends_it_though_it_is_no_text(
    sampling: dict[str, Any], text: str
) -> None:
    found, sequence = generate([CAT, EOS, CAT], stop=("</s>",), ignore_eos=True, **sampling)

    assert (found, end_of(sequence)) == (text, (FinishReason.STOP, "</s>", 2))


def test_tokens_without_a_logit_end_nothing() -> None:
    _, sequence = generate([], stop=("</s>",), stop_token_ids=(ICE,))

    assert StopChecker(frozenset({EOS, CAT}), EOS).ending_token_ids(sequence) == {CAT, ICE}
