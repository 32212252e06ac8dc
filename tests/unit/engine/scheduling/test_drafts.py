"""Steps that check guesses give what steps without them give, right guesses or wrong."""

from collections.abc import Sequence as Items
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.scheduling import Answer, SchedulerHarness, Setup, generate_request, undisturbed
from support.models.word_tokenizer import EOS, VOCAB_SIZE, WORDS

from loraplex.engine.sequence import Sequence

PROMPT = [1, 2, 3, 4, 5, 6, 7]

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 3},
    "with penalties": {"temperature": 0.8, "seed": 5, "frequency_penalty": 1.0},
    "with logprobs": {"logprobs": 2},
    "with a minimum length": {"min_tokens": 6, "temperature": 1.0, "seed": 11},
    "with a stop string": {"temperature": 1.0, "seed": 7, "stop": (WORDS[8], WORDS[9])},
    "with a bias": {"logit_bias": {EOS: 2.0}, "temperature": 1.0, "seed": 2},
}


class Guesses:
    """Proposes what is known to come, with some tokens replaced."""

    def __init__(self, truth: Items[int], wrong: frozenset[int], most: int) -> None:
        self._truth, self._wrong, self._most = truth, wrong, most

    def propose(self, sequence: Sequence) -> tuple[int, ...]:
        start = sequence.num_output_tokens
        places = range(start, start + self._most)
        return tuple(self._guess(place) for place in places)

    def _guess(self, place: int) -> int:
        if place >= len(self._truth):
            return EOS
        token = self._truth[place]
        return (token + 1) % VOCAB_SIZE if place in self._wrong else token


def answer_with(guesses: Guesses, setup: Setup | None = None, **kind: Any) -> tuple[Answer, int]:
    """The answer, and the number of steps that it took."""
    harness = SchedulerHarness(setup)
    harness.scheduler.drafter = guesses
    harness.add(generate_request("r", PROMPT, max_tokens=12, **kind))
    num_steps = harness.run()
    harness.check_nothing_is_held()
    return harness.answers["r", 0], num_steps


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@given(wrong=st.frozensets(st.integers(0, 12)), most=st.integers(0, 6))
def test_guesses_change_nothing(kind: dict[str, Any], wrong: frozenset[int], most: int) -> None:
    (expected,) = undisturbed(generate_request("r", PROMPT, max_tokens=12, **kind))

    answer, _ = answer_with(Guesses(expected.token_ids, wrong, most), **kind)

    assert answer == expected


def test_right_guesses_save_steps() -> None:
    (expected,) = undisturbed(generate_request("r", PROMPT, max_tokens=12, ignore_eos=True))

    guesses = Guesses(expected.token_ids, frozenset(), most=5)
    answer, num_steps = answer_with(guesses, ignore_eos=True)

    assert answer == expected
    assert num_steps == 3  # the prompt with its first token, then 6 tokens and 5


def test_what_right_guesses_filled_is_found_again() -> None:
    (expected,) = undisturbed(generate_request("r", PROMPT, max_tokens=12, ignore_eos=True))
    harness = SchedulerHarness()
    harness.scheduler.drafter = Guesses(expected.token_ids, frozenset(), most=5)
    harness.add(generate_request("r", PROMPT, max_tokens=12, ignore_eos=True))
    harness.run()
    harness.scheduler.drafter = None
    harness.add(generate_request("again", PROMPT + expected.token_ids, max_tokens=1))
    harness.run()

    whole_blocks = (len(PROMPT) + 11) // 4 * 4
    assert harness.num_cached["again"] == whole_blocks


def test_guesses_take_only_what_a_step_has_left() -> None:
    (expected,) = undisturbed(generate_request("r", PROMPT, max_tokens=12, ignore_eos=True))
    setup = Setup(max_num_batched_tokens=3)

    answer, _ = answer_with(
        Guesses(expected.token_ids, frozenset(), most=6), setup, ignore_eos=True
    )

    assert answer == expected
