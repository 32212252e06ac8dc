"""Tenants share what there is by their weights, whatever they ask for."""

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clocks import FakeClock
from support.engine.kv import FULL
from support.engine.scheduling import SchedulerHarness, Setup, generate_request
from support.engine.town import Demand, Town

from loraplex.engine.scheduling.fair_share import FairPolicy
from loraplex.engine.scheduling.policy import FCFSPolicy, SchedulingPolicy

NAMES = [f"{i}" for i in range(8)]
# Room for all: what is then served depends on turns alone.
ROOMY = Setup(num_blocks=400, block_size=4, groups=FULL, max_num_batched_tokens=16, num_slots=8)
TIGHT = Setup(num_blocks=40, block_size=4, groups=FULL, max_num_batched_tokens=12, num_slots=8)
MANY_BYTES = {name: size << 20 for size, name in enumerate(NAMES)}


def lengths(most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, most), min_size=1, max_size=4)


DEMANDS = st.lists(
    st.builds(
        Demand,
        weight=st.sampled_from([0.5, 1.0, 1.0, 3.0]),
        prompts=lengths(40),
        outputs=lengths(12),
        adapters=st.lists(st.sampled_from([None, *NAMES]), min_size=1, max_size=3),
    ),
    min_size=2,
    max_size=4,
)


class Spread:
    """How far two tenants' services have drifted apart since this was made, and at most."""

    def __init__(self, town: Town, pair: tuple[int, int]) -> None:
        self._town, self._pair = town, pair
        self._low = self._high = self._difference()

    def note(self) -> None:
        now = self._difference()
        self._low, self._high = min(self._low, now), max(self._high, now)

    @property
    def is_within_the_bound(self) -> bool:
        """The largest gap of any interval, against the work that both had under way at most."""
        first, second = self._pair
        bound = self._town.stake(first) + self._town.stake(second)
        return self._high - self._low <= bound + 1e-6

    def _difference(self) -> float:
        first, second = self._pair
        return self._town.service(first) - self._town.service(second)


def watch(town: Town, num_steps: int) -> list[Spread]:
    """Steps with all tenants backlogged; the spread of each pair over that time."""
    everyone = range(len(town.demands))
    town.keep_backlogged(everyone)
    spreads = [Spread(town, pair) for pair in combinations(everyone, 2)]
    for _ in range(num_steps):
        town.keep_backlogged(everyone)
        town.step()
        for spread in spreads:
            spread.note()
    return spreads


@pytest.mark.parametrize("room", [ROOMY, TIGHT], ids=["roomy", "tight"])
@given(demands=DEMANDS, num_seqs=st.integers(2, 8))
def test_backlogged_tenants_stay_within_the_bound(
    room: Setup, demands: list[Demand], num_seqs: int
) -> None:
    setup = Setup(**vars(room) | {"max_num_seqs": num_seqs, "adapter_bytes": MANY_BYTES})
    town = Town(demands, setup)

    spreads = watch(town, num_steps=60)

    assert all(spread.is_within_the_bound for spread in spreads)


def test_first_come_first_served_breaks_the_bound() -> None:
    demands = [Demand(prompts=(40,)), Demand(prompts=(2,), outputs=(1,))]
    town = Town(demands, ROOMY, FCFSPolicy())
    town.ask(0, times=100)

    spreads = watch(town, num_steps=60)

    assert not all(spread.is_within_the_bound for spread in spreads)


def test_shares_follow_the_weights() -> None:
    town = Town([Demand(weight=1.0), Demand(weight=3.0)], ROOMY)

    watch(town, num_steps=400)

    light, heavy = (town.policy.ledger.of(name) for name in ("0", "1"))
    assert heavy.prefill_tokens / light.prefill_tokens == pytest.approx(3.0, rel=0.05)


def test_ten_adapters_and_keys_gain_nothing_over_one() -> None:
    def served(adapters: list[str | None]) -> list[float]:
        setup = Setup(**vars(ROOMY) | {"num_slots": 11})
        town = Town([Demand(adapters=adapters), Demand(adapters=["other"])], setup)
        watch(town, num_steps=100)
        return [town.service(0), town.service(1)]

    assert served([f"a{i}" for i in range(10)]) == served(["a"])


def test_loading_adapters_is_paid_for() -> None:
    setup = Setup(**vars(ROOMY) | {"num_slots": 2, "adapter_bytes": dict.fromkeys(NAMES, 8 << 20)})
    town = Town([Demand(adapters=NAMES), Demand()], setup)

    watch(town, num_steps=100)

    loads, base = (town.policy.ledger.of(name) for name in ("0", "1"))
    assert loads.loaded_bytes >= 8 << 23
    assert loads.prefill_tokens < base.prefill_tokens


def test_a_resident_adapter_costs_nothing_more() -> None:
    setup = Setup(**vars(ROOMY) | {"adapter_bytes": {"a": 5 << 20}})
    town = Town([Demand(adapters=["a"])], setup)
    town.ask(0, times=6)

    town.harness.run()

    assert town.policy.ledger.of("0").loaded_bytes == 5 << 20


@settings(max_examples=20)
@given(idle_steps=st.integers(1, 80), before=st.integers(0, 40), demands=DEMANDS)
def test_an_idle_tenant_returns_without_credit(
    idle_steps: int, before: int, demands: list[Demand]
) -> None:
    town = Town(demands[:2], ROOMY)
    watch(town, num_steps=before)
    for _ in range(idle_steps):
        town.keep_backlogged([0])
        town.step()

    spreads = watch(town, num_steps=60)

    assert all(spread.is_within_the_bound for spread in spreads)


def test_a_trickle_of_small_requests_saves_up_no_turns() -> None:
    town = Town([Demand(prompts=(12,)), Demand(prompts=(1,), outputs=(1,))], ROOMY)
    for _ in range(200):
        town.keep_backlogged([0])
        town.ask(1)
        town.step()

    spreads = watch(town, num_steps=100)

    assert all(spread.is_within_the_bound for spread in spreads)


@given(
    requests=st.lists(
        st.tuples(
            st.integers(0, 10),  # arrives after so many steps
            st.integers(1, 40),
            st.integers(1, 10),
            st.integers(-1, 1),
            st.sampled_from([None, "a", "b", "c"]),
        ),
        min_size=1,
        max_size=15,
    ),
    num_blocks=st.integers(14, 60),
)
def test_one_tenant_is_served_first_come_first_served(
    requests: list[tuple[Any, ...]], num_blocks: int
) -> None:
    setup = Setup(num_blocks=num_blocks, groups=FULL, max_num_batched_tokens=9, load_delay=1)

    def steps(policy: SchedulingPolicy) -> list[list[tuple[str, int]]]:
        town = Town([], setup, policy)
        taken = []
        for step in range(100):
            for index, (arrival, length, num_outputs, priority, adapter) in enumerate(requests):
                if arrival == step:
                    town.harness.add(
                        generate_request(
                            f"{index}",
                            [index % 11] * length,
                            priority=priority,
                            adapter=adapter,
                            max_tokens=num_outputs,
                            ignore_eos=True,
                        )
                    )
            output = town.harness.step()
            taken.append([(i.sequence.request_id, i.num_tokens) for i in output.scheduled])
        return taken

    assert steps(FairPolicy()) == steps(FCFSPolicy())


@given(demands=DEMANDS, asked=st.lists(st.integers(0, 3), max_size=30))
def test_no_token_of_a_step_is_left_while_somebody_could_use_it(
    demands: list[Demand], asked: list[int]
) -> None:
    setup = Setup(**vars(ROOMY) | {"max_num_seqs": 4, "max_num_batched_tokens": 10})
    town = Town(demands, setup)
    for index in asked:
        town.ask(index % len(demands))
    scheduler = town.harness.scheduler

    while scheduler.running or scheduler.waiting:
        output = scheduler.schedule()
        partial = [i for i in output.scheduled if i.num_tokens < i.sequence.num_uncomputed_tokens]
        waiting = scheduler.waiting and len(scheduler.running) < setup.max_num_seqs
        if partial or waiting:
            assert output.num_tokens == setup.max_num_batched_tokens
        scheduler.update(output, town.harness.model.execute(output.step))


@pytest.mark.parametrize("num_adapters", [0, 1, 6])
def test_a_flood_does_not_hold_up_another_tenants_request(num_adapters: int) -> None:
    flood = Demand(prompts=(100,), outputs=(20,), adapters=[None, *NAMES][: num_adapters + 1])
    town = Town([flood, Demand(prompts=(3,))], ROOMY)
    town.ask(0, times=200)
    for _ in range(5):
        town.step()

    (quick,) = town.ask(1)
    town.step()

    assert quick.num_output_tokens == 1


def test_what_remains_of_a_step_goes_to_the_long_prompt_that_let_others_pass() -> None:
    town = Town([Demand(prompts=(100,)), Demand(prompts=(3,))], ROOMY)
    town.ask(0)
    town.step()
    town.ask(1)

    computed = town.step()

    assert computed == {"0": ROOMY.max_num_batched_tokens - 3, "1": 3}


def test_among_equals_the_first_to_come_begins() -> None:
    harness = SchedulerHarness(Setup(max_num_seqs=1))
    for name in ("c", "a", "b"):
        harness.add(generate_request(name, [1, 2], tenant=name, namespace=name, max_tokens=1))

    harness.run()

    assert [request_id for request_id, _ in harness.answers] == ["c", "a", "b"]


def test_who_is_exempt_goes_first_and_is_not_charged_against_others() -> None:
    town = Town([Demand(), Demand()], Setup(max_num_seqs=1), FairPolicy(exempt="1"))
    town.ask(0, times=2)
    operators = town.ask(1, times=3)
    for _ in range(12):
        town.step()

    assert all(sequence.is_finished for sequence in operators)
    assert town.policy.ledger.of("0").prefill_tokens == 0


def test_one_tenants_adapters_that_wait_for_slots_keep_no_other_tenant_waiting() -> None:
    setup = Setup(**vars(ROOMY) | {"num_slots": 1, "load_delay": 50})
    town = Town([Demand(adapters=NAMES), Demand()], setup)
    town.ask(0, times=8)
    (base,) = town.ask(1)

    town.step()

    assert base.num_output_tokens == 1


def test_a_stream_for_one_adapter_keeps_another_tenants_from_its_slot_for_a_bounded_time() -> None:
    clock = FakeClock()
    setup = Setup(groups=FULL, num_slots=1, max_num_seqs=4, adapter_wait=2.0)
    harness = SchedulerHarness(setup, clock)
    for number in range(30):  # a step is 50 ms; each request for "hot" runs for 12 of them
        name = f"hot {number}"
        hot = generate_request(name, [1], tenant="hot", adapter="a", ignore_eos=True, max_tokens=12)
        harness.add(hot)
        if number == 2:
            cold = harness.add(generate_request("cold", [2], tenant="cold", adapter="b"))
        for _ in range(3):
            harness.step()
            clock.now += 0.05
        if number > 2 and cold.num_output_tokens:
            break

    assert cold.num_output_tokens
    assert clock.now <= 2 * 0.15 + 2.0 + 13 * 0.05 + 3 * 0.05


def test_who_waited_for_an_adapter_has_no_credit_when_it_is_there() -> None:
    setup = Setup(**vars(ROOMY) | {"load_delay": 120})
    town = Town([Demand(adapters=["a"]), Demand()], setup)
    town.ask(0, times=30)
    for _ in range(60):
        town.keep_backlogged([1])
        town.step()
    while not town.policy.ledger.of("0").prefill_tokens:
        town.keep_backlogged([0, 1])
        town.step()

    spreads = watch(town, num_steps=60)

    assert all(spread.is_within_the_bound for spread in spreads)
