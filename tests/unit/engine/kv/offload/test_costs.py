"""A copy is made where it is cheaper than computing, as far as is known."""

import pytest

from loraplex.engine.kv.offload.costs import MAX_WAIT, OffloadCosts
from loraplex.engine.kv.recompute_cost import MIN_TOKENS, RecomputeCost

BLOCK_BYTES = 1_000_000


@pytest.fixture
def recompute() -> RecomputeCost:
    return RecomputeCost()


@pytest.fixture
def costs(recompute: RecomputeCost) -> OffloadCosts:
    """A block takes 1 ms to copy and, until one was read, 2 ms to read; it saves 2 tokens."""
    return OffloadCosts(recompute, BLOCK_BYTES, tokens_per_block=2.0, copy_rate=1e9)


def test_what_is_not_measured_is_worth_a_copy(costs: OffloadCosts) -> None:
    assert costs.is_worth_keeping()
    assert costs.is_worth_reading(10**6, num_tokens=1)


@pytest.mark.parametrize(("seconds_per_token", "is_worth"), [(0.0011, True), (0.0009, False)])
def test_a_block_is_kept_where_both_copies_are_cheaper_than_its_tokens(
    costs: OffloadCosts, recompute: RecomputeCost, seconds_per_token: float, is_worth: bool
) -> None:
    recompute.seconds_per_token = seconds_per_token

    assert costs.is_worth_keeping() == is_worth


@pytest.mark.parametrize(("num_tokens", "is_worth"), [(25, True), (20, False)])
def test_blocks_are_read_where_that_is_cheaper_than_their_tokens(
    costs: OffloadCosts, recompute: RecomputeCost, num_tokens: int, is_worth: bool
) -> None:
    recompute.seconds_per_token = 0.001

    assert costs.is_worth_reading(10, num_tokens) == is_worth


def test_a_disk_that_turns_out_slow_is_not_read(
    costs: OffloadCosts, recompute: RecomputeCost
) -> None:
    recompute.seconds_per_token = 0.001
    was_worth = costs.is_worth_reading(10, 100)

    for _ in range(20):
        costs.note_read(10, seconds=2.0)

    assert (was_worth, costs.is_worth_reading(10, 100)) == (True, False)


def test_nobody_waits_longer_than_computing_takes(
    costs: OffloadCosts, recompute: RecomputeCost
) -> None:
    unknown = costs.max_wait_s(100)
    recompute.seconds_per_token = 0.001

    assert unknown == MAX_WAIT
    assert costs.max_wait_s(100) == pytest.approx(0.101)
    assert costs.max_wait_s(10**6) == MAX_WAIT


def test_a_token_costs_what_steps_with_prompts_took(recompute: RecomputeCost) -> None:
    for _ in range(50):
        recompute.note(100, num_sequences=1, seconds=0.5)

    assert recompute.seconds(10) == pytest.approx(0.05)


@pytest.mark.parametrize(("num_tokens", "num_sequences"), [(MIN_TOKENS - 1, 1), (64, 64)])
def test_small_and_decode_steps_say_nothing_of_prompts(
    recompute: RecomputeCost, num_tokens: int, num_sequences: int
) -> None:
    recompute.note(num_tokens, num_sequences, seconds=1.0)

    assert recompute.seconds(1) is None
