"""A step costs the same, however many requests wait."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.engine.kv import FULL
from support.engine.scheduling import SchedulerHarness, Setup, generate_request
from support.engine.whole_engine import WholeEngine
from support.visits import count_visits

from loraplex.engine.protocol import TenantShare
from loraplex.engine.scheduling.fair_share import FairPolicy
from loraplex.engine.scheduling.policy import FCFSPolicy, SchedulingPolicy

FEW, MANY = 20, 2000
SEARCHED = 40  # more at most, where the places of those that begin are searched by halves
TENANTS = 4
ROOMY = Setup(num_blocks=400, groups=FULL, max_num_batched_tokens=16, max_num_seqs=4)


def add(harness: SchedulerHarness, count: int, length: int = 3, adapter: str | None = None) -> None:
    """Requests of some tenants, all different."""
    for number in range(count):
        tenant = f"{number % TENANTS}"
        prompt = [number % 11, number // 11 % 11, number // 121 % 11, *[2] * (length - 3)]
        harness.add(
            generate_request(
                f"{number} of {length}",
                prompt,
                tenant=tenant,
                namespace=tenant,
                adapter=adapter,
                max_tokens=100,
                ignore_eos=True,
            )
        )


def without_rows(policy: SchedulingPolicy, count: int) -> SchedulerHarness:
    harness = SchedulerHarness(ROOMY, policy=policy)
    add(harness, 4)
    harness.step()
    add(harness, count)
    return harness


def beside_a_long_prompt(policy: SchedulingPolicy, count: int) -> SchedulerHarness:
    harness = SchedulerHarness(ROOMY, policy=policy)
    add(harness, 1, length=90)
    harness.step()
    add(harness, count)
    return harness


def without_room(policy: SchedulingPolicy, count: int) -> SchedulerHarness:
    harness = SchedulerHarness(Setup(**vars(ROOMY) | {"num_blocks": 20}), policy=policy)
    harness.kv.pool.set_shares([TenantShare("0", floor=12)])
    add(harness, TENANTS + 1, length=40)
    harness.step()
    add(harness, count, length=40)
    return harness


def at_their_ceilings(policy: SchedulingPolicy, count: int) -> SchedulerHarness:
    harness = SchedulerHarness(ROOMY, policy=policy)
    harness.kv.pool.set_shares([TenantShare(f"{i}", ceiling=1) for i in range(TENANTS)])
    add(harness, 1)
    harness.step()
    add(harness, count, length=8)
    return harness


def for_an_adapter(policy: SchedulingPolicy, count: int) -> SchedulerHarness:
    harness = SchedulerHarness(Setup(**vars(ROOMY) | {"load_delay": 50}), policy=policy)
    add(harness, count, adapter="a")
    return harness


def for_a_slot(policy: SchedulingPolicy, count: int) -> SchedulerHarness:
    harness = SchedulerHarness(Setup(**vars(ROOMY) | {"num_slots": 1}), policy=policy)
    add(harness, 1, adapter="a")
    harness.step()
    add(harness, count, adapter="b")
    return harness


def for_one_prefix(policy: SchedulingPolicy, count: int) -> SchedulerHarness:
    """That is computed in the step itself, which leaves tokens for others."""
    harness = SchedulerHarness(ROOMY, policy=policy)
    for number in range(count):
        harness.add(generate_request(f"{number}", [1] * 9, max_tokens=100, ignore_eos=True))
    return harness


WAITS = [
    without_rows,
    beside_a_long_prompt,
    without_room,
    at_their_ceilings,
    for_an_adapter,
    for_a_slot,
    for_one_prefix,
]


@pytest.mark.parametrize("policy", [FairPolicy, FCFSPolicy])
@pytest.mark.parametrize("waits", WAITS)
def test_a_step_looks_at_no_more_requests_where_more_wait(
    waits: Callable[[SchedulingPolicy, int], SchedulerHarness], policy: type[SchedulingPolicy]
) -> None:
    harnesses = [waits(policy(), count) for count in (FEW, MANY)]

    few, many = [count_visits(harness.scheduler.schedule) for harness in harnesses]

    assert len(harnesses[-1].scheduler.waiting) >= MANY - ROOMY.max_num_seqs
    assert many <= few + SEARCHED


def test_nor_does_the_engine_around_it(tmp_path: Path) -> None:
    engines = [WholeEngine(ROOMY, 8, tmp_path / f"{i}", 1 << 20) for i in range(2)]
    for whole, count in zip(engines, (FEW, MANY), strict=True):
        for number in range(count):
            request = generate_request(f"{number}", [1, 2], ignore_eos=True)
            whole.engine.add(request)
        whole.engine.step()

    few, many = [count_visits(whole.engine.step) for whole in engines]

    assert many <= few + SEARCHED


@pytest.mark.parametrize("policy", [FairPolicy, FCFSPolicy])
@pytest.mark.parametrize("waits", WAITS)
def test_an_abort_looks_at_no_more_requests_where_more_wait(
    waits: Callable[[SchedulingPolicy, int], SchedulerHarness], policy: type[SchedulingPolicy]
) -> None:
    scheduler = waits(policy(), MANY).scheduler
    *_, last = scheduler.waiting

    visits = count_visits(partial(scheduler.abort, last.request_id))

    assert visits <= SEARCHED
