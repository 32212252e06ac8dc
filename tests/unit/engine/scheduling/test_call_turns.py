"""The prompts of one request let the same tenant's other requests pass."""

from itertools import count

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.kv import FULL
from support.engine.scheduling import SchedulerHarness, Setup, generate_request

from loraplex.engine.scheduling.fair_share import FairPolicy
from loraplex.engine.scheduling.policy import FCFSPolicy, SchedulingPolicy
from loraplex.engine.sequence import Sequence

ROWS, LENGTH = 4, 6  # rows of a step, and tokens that each choice generates
SETUP = Setup(num_blocks=400, groups=FULL, max_num_seqs=ROWS, max_num_batched_tokens=64)
NAMES = count()
POLICIES = pytest.mark.parametrize("policy", [FairPolicy, FCFSPolicy])


def add_call(harness: SchedulerHarness, num_prompts: int, n: int) -> list[Sequence]:
    call = f"call-{next(NAMES)}"
    sequences = []
    for number in range(num_prompts):
        name = f"{call}-{number}"
        request = generate_request(
            name, [number % 11, 3, 5], namespace=name, n=n, max_tokens=LENGTH, ignore_eos=True
        )
        sequences.append(harness.add(msgspec.structs.replace(request, call_id=call)))
    return sequences


@POLICIES
@pytest.mark.parametrize("n", [1, ROWS])
def test_a_small_request_waits_for_a_place_and_not_for_a_large_one(
    policy: type[SchedulingPolicy], n: int
) -> None:
    harness = SchedulerHarness(SETUP, policy=policy())
    large = add_call(harness, 40, n)
    harness.step()
    (small,) = add_call(harness, 1, 1)

    for _ in range(2 * (LENGTH + 1)):
        harness.step()

    assert small.is_finished
    assert not any(sequence.is_finished for sequence in large[3 * ROWS :])


@POLICIES
def test_two_large_requests_have_as_many_rows_each(policy: type[SchedulingPolicy]) -> None:
    harness = SchedulerHarness(SETUP, policy=policy())
    many, wide = add_call(harness, 40, 1), add_call(harness, 20, ROWS)

    for _ in range(12 * (LENGTH + 1)):
        harness.step()

    rows = [sum(s.sampling.n for s in call if s.num_output_tokens) for call in (many, wide)]
    assert min(rows) > 0
    assert abs(rows[0] - rows[1]) <= 2 * ROWS


@POLICIES
@pytest.mark.parametrize("tenant", ["tenant", "other"])
def test_a_request_of_as_many_choices_as_rows_begins_though_small_ones_never_end(
    policy: type[SchedulingPolicy], tenant: str
) -> None:
    harness = SchedulerHarness(SETUP, policy=policy())
    for _ in range(2 * ROWS):
        add_call(harness, 1, 1)
    harness.step()
    whole = harness.add(
        generate_request("whole", [2], tenant=tenant, n=ROWS, max_tokens=LENGTH, ignore_eos=True)
    )

    for _ in range(12 * LENGTH):
        add_call(harness, 1, 1)
        harness.step()

    assert whole.is_finished


@given(st.lists(st.integers(0, 3), max_size=12))
def test_requests_of_one_prompt_begin_as_they_came(pauses: list[int]) -> None:
    harness = SchedulerHarness(SETUP)
    sequences: list[Sequence] = []
    begun: list[Sequence] = []
    for pause in [*pauses, 200]:
        for _ in range(pause):
            harness.step()
            begun += [s for s in sequences if s.num_output_tokens and s not in begun]
        sequences += add_call(harness, 1, 1)

    assert begun == sequences[: len(begun)]
    assert len(begun) >= len(pauses)


def test_nothing_is_kept_of_calls_that_wait_no_more() -> None:
    harness = SchedulerHarness(SETUP)
    first, second = add_call(harness, 9, ROWS), add_call(harness, 9, 1)
    harness.step()
    for sequence in [*first[:5], *second]:
        harness.scheduler.abort(sequence.request_id)
    harness.run()

    turns = harness.scheduler.waiting._turns
    assert (turns._next, turns._num_waiting) == ({}, {})
