"""Slots go to those who have one, and within a bound to those who wait for one."""

from typing import Any

import pytest
from support.engine.adapter_slots import NamedSlots
from support.engine.kv import adapter_ref, sequence_of
from support.engine.scheduling import SchedulerHarness, Setup, generate_request
from support.models.word_tokenizer import EOS

from loraplex.engine.protocol import GenerateRequest
from loraplex.engine.scheduling.adapter_slots import AdapterSlots
from loraplex.engine.sequence import Sequence

MAX_WAIT = 2.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def user_of(adapter: str | None) -> Sequence:
    return sequence_of([1], adapter=adapter)


class Entrance:
    """A adapter_slots with its slots, its clock and the sequences that passed it."""

    def __init__(self, num_slots: int = 1, **slots: Any) -> None:
        self.clock = Clock()
        self.slots = NamedSlots(num_slots, **slots)
        self.adapter_slots = AdapterSlots(self.slots, MAX_WAIT, self.clock)
        self.running: list[Sequence] = []

    def open(self, adapter: str | None) -> Sequence | None:
        sequence = user_of(adapter)
        if not self.adapter_slots.open(sequence, self.running):
            return None
        self.running.append(sequence)
        return sequence

    def close(self, sequence: Sequence | None) -> None:
        assert sequence is not None
        self.adapter_slots.close(sequence)
        self.running.remove(sequence)


def test_the_base_model_needs_no_slot() -> None:
    entrance = Entrance(num_slots=1)
    entrance.open("a")

    base = entrance.open(None)

    assert base is not None
    assert base.adapter_slot == -1


def test_an_adapter_that_is_still_loading_takes_no_slot() -> None:
    entrance = Entrance(delay=1)

    assert entrance.open("a") is None
    assert entrance.open("a") is not None


def test_sequences_of_one_adapter_share_its_slot() -> None:
    entrance = Entrance()

    first, second = entrance.open("a"), entrance.open("a")

    assert first is not None
    assert second is not None
    assert first.adapter_slot == second.adapter_slot == 0
    assert entrance.slots.pool.num_references == 2


def test_a_slot_in_use_is_not_given_to_another() -> None:
    entrance = Entrance()
    user = entrance.open("a")

    refused = entrance.open("b")
    entrance.close(user)

    assert refused is None
    assert entrance.open("b") is not None


def test_a_forked_sequence_holds_the_slot_too() -> None:
    entrance = Entrance()
    parent = entrance.open("a")
    assert parent is not None
    child = parent.fork(1)
    entrance.adapter_slots.retain_slot(parent, child)

    entrance.close(parent)

    assert entrance.open("b") is None
    assert child.adapter_slot == 0


def test_closing_twice_gives_back_once() -> None:
    entrance = Entrance()
    sequence = entrance.open("a")
    entrance.open("a")
    assert sequence is not None

    entrance.adapter_slots.close(sequence)
    entrance.adapter_slots.close(sequence)

    assert entrance.slots.pool.num_references == 1


def test_resident_adapters_go_first_until_another_has_waited_too_long() -> None:
    entrance = Entrance()
    entrance.open("hot")
    entrance.open("cold")
    entrance.clock.now = MAX_WAIT - 0.1
    before = [entrance.open("cold"), entrance.open("hot")]
    entrance.clock.now = MAX_WAIT

    after = [entrance.open("cold"), entrance.open("hot")]

    assert [sequence is not None for sequence in before] == [False, True]
    assert after == [None, None]


def test_the_drained_slot_goes_to_the_one_who_waited_and_the_drain_is_over() -> None:
    entrance = Entrance()
    user = entrance.open("hot")
    entrance.open("cold")
    entrance.clock.now = MAX_WAIT
    entrance.open("cold")
    entrance.close(user)

    cold = entrance.open("cold")
    entrance.close(cold)

    assert cold is not None
    assert entrance.open("hot") is not None


def test_a_drain_ends_when_nobody_waits_for_it_any_more() -> None:
    entrance = Entrance()
    entrance.open("hot")
    entrance.open("cold")
    entrance.clock.now = MAX_WAIT
    entrance.open("cold")

    entrance.adapter_slots.forget_absent([adapter_ref("hot")])

    assert entrance.open("hot") is not None


def test_a_wait_that_was_given_up_does_not_count_later() -> None:
    entrance = Entrance()
    entrance.open("hot")
    entrance.open("cold")
    entrance.adapter_slots.forget_absent([])
    entrance.clock.now = MAX_WAIT

    entrance.open("cold")

    assert entrance.open("hot") is not None


def test_the_least_used_adapter_is_drained() -> None:
    entrance = Entrance(num_slots=2)
    for adapter in ("busy", "busy", "quiet"):
        entrance.open(adapter)
    entrance.open("cold")
    entrance.clock.now = MAX_WAIT
    entrance.open("cold")

    assert entrance.open("quiet") is None
    assert entrance.open("busy") is not None


def test_nobody_snatches_what_was_drained_for_another() -> None:
    entrance = Entrance()
    user = entrance.open("hot")
    entrance.open("cold")
    entrance.clock.now = MAX_WAIT
    entrance.open("cold")
    entrance.close(user)

    assert entrance.open("snatcher") is None
    assert entrance.open("cold") is not None


def test_as_many_are_drained_as_a_large_adapter_needs() -> None:
    entrance = Entrance(num_slots=3, sizes={"a": 4, "b": 4, "large": 7}, max_bytes=10)
    users = [entrance.open("a"), entrance.open("b")]
    entrance.open("large")
    entrance.clock.now = MAX_WAIT
    entrance.open("large")
    entrance.close(users[0])
    halfway = [entrance.open("large"), entrance.open("a")]
    entrance.close(users[1])

    assert halfway == [None, None]
    assert entrance.open("large") is not None


def test_a_slot_is_drained_of_everyone_who_uses_its_content() -> None:
    entrance = Entrance()
    entrance.open("hot")
    entrance.open("cold")
    entrance.clock.now = MAX_WAIT
    entrance.open("cold")
    twin = sequence_of([1], adapter="hot")
    twin.adapter = adapter_ref("hot", tenant="another")

    assert not entrance.adapter_slots.open(twin, entrance.running)


def stream_request(number: int, adapter: str | None) -> GenerateRequest:
    return generate_request(
        f"{adapter}-{number}", [1, 2, 3], adapter=adapter, max_tokens=10, logit_bias={EOS: -100.0}
    )


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_steady_stream_for_one_adapter_does_not_starve_another(num_slots: int) -> None:
    clock = Clock()
    harness = SchedulerHarness(Setup(num_slots=num_slots, adapter_wait=MAX_WAIT), clock)
    residents = ["hot", "warm"][:num_slots]
    first_token: dict[str, int] = {}
    for step in range(120):
        clock.now = 0.1 * step
        harness.add(stream_request(step, residents[step % num_slots]))
        if step == 5:
            harness.add(stream_request(0, "cold"))
        if step % 10 == 0:
            harness.add(stream_request(step, None))
        harness.step()
        for request_id, _ in harness.answers:
            first_token.setdefault(request_id, step)

    longest_running = 10
    assert first_token["cold-0"] - 5 <= MAX_WAIT / 0.1 + longest_running + 1
    assert len({key for key in first_token if key.startswith(residents[0])}) > 30


def test_base_requests_are_not_delayed_while_slots_are_short() -> None:
    harness = SchedulerHarness(Setup(num_slots=1, max_num_seqs=20))
    for number, adapter in enumerate(["a", "b", "c", None, "b", None]):
        harness.add(stream_request(number, adapter))

    harness.step()

    assert {key for key, _ in harness.answers} == {"a-0", "None-3", "None-5"}
