"""Which tokens may come next."""

import numpy as np
import pytest

from loraplex.engine.model_limits import ModelLimits
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduling.token_masks import token_masks

VOCAB_SIZE = 12


def allowed(
    output: list[int] | None = None, drafts: list[int] | None = None, **sampling: object
) -> list[set[int]]:
    """The tokens that each row may choose."""
    masks = token_masks(SamplingParams(**sampling), output or [], drafts or [], VOCAB_SIZE)  # type: ignore[arg-type]
    assert masks is not None
    assert masks.shape == (1 + len(drafts or []), 2)
    bits = np.unpackbits(masks, axis=1, bitorder="little", count=VOCAB_SIZE)
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def all_but(*tokens: int) -> set[int]:
    return set(range(VOCAB_SIZE)) - set(tokens)


def test_without_a_restriction_there_is_no_mask() -> None:
    assert token_masks(SamplingParams(), [1], [], VOCAB_SIZE) is None


def test_only_allowed_tokens_may_come() -> None:
    assert allowed(allowed_token_ids=(3, 11)) == [{3, 11}]


@pytest.mark.parametrize(
    ("output", "banned"), [([], ()), ([5], (6,)), ([5, 6], ()), ([6, 5], (6,)), ([9, 5], (6, 7))]
)
def test_a_bad_word_is_never_completed(output: list[int], banned: tuple[int, ...]) -> None:
    assert allowed(output, bad_token_sequences=((5, 6), (9, 5, 7))) == [all_but(*banned)]


def test_a_word_of_one_token_never_comes() -> None:
    assert allowed([1], bad_token_sequences=((4,),)) == [all_but(4)]


def test_drafts_are_taken_for_output() -> None:
    rows = allowed([1], [5, 6], bad_token_sequences=((5, 6), (6, 7)))

    assert rows == [all_but(), all_but(6), all_but(7)]


def test_a_ban_of_all_that_is_allowed_is_not_kept() -> None:
    rows = allowed([5], allowed_token_ids=(5, 6), bad_token_sequences=((5, 5), (5, 6)))

    assert rows == [{5, 6}]


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"allowed_token_ids": (5,), "bad_token_sequences": ((5,),)}, "allowed_token_ids"),
        ({"bad_token_sequences": tuple((t,) for t in range(VOCAB_SIZE))}, "bad_words"),
        ({"allowed_token_ids": (1,), "min_tokens": 2}, "min_tokens"),
        ({"stop_token_ids": tuple(range(VOCAB_SIZE)), "min_tokens": 1}, "min_tokens"),
        ({"allowed_token_ids": (VOCAB_SIZE,)}, "allowed_token_ids"),
    ],
)
def test_what_leaves_no_token_is_refused(sampling: dict[str, object], param: str) -> None:
    limits = ModelLimits(64, VOCAB_SIZE, 4, frozenset({1}))

    faults = limits.sampling_faults(SamplingParams(**sampling))  # type: ignore[arg-type]

    assert [name for name, _ in faults] == [param]
