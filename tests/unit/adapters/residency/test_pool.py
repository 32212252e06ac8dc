"""AdapterPool: a closed book of slots."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.clocks import FakeClock

from loraplex.adapters.residency.eviction import CostAwareEviction
from loraplex.adapters.residency.pool import AdapterPool

KEYS = "abcde"
BYTES = {"a": 1, "b": 2, "c": 3, "d": 5, "e": 8}


def test_a_free_slot_is_used_before_an_idle_one() -> None:
    pool = AdapterPool(2)
    first = pool.acquire("a")
    pool.release("a")
    assert pool.acquire("b") != first
    assert "a" in pool


def test_the_least_recently_used_idle_key_leaves() -> None:
    pool = AdapterPool(2)
    for key in ("a", "b", "a"):
        pool.acquire(key)
        pool.release(key)
    pool.acquire("c")
    assert ("a" in pool, "b" in pool, pool.num_evictions) == (True, False, 1)


def test_there_is_no_slot_while_all_are_in_use() -> None:
    pool = AdapterPool(1)
    pool.acquire("a")
    assert pool.acquire("b") is None
    assert not pool.can_acquire("b")


def test_idle_keys_leave_until_the_bytes_fit() -> None:
    pool = AdapterPool(4, max_bytes=10)
    for key in ("a", "b", "c"):
        pool.acquire(key, 3)
        pool.release(key)

    slot = pool.acquire("large", 7)

    assert ("a" in pool, "b" in pool, "c" in pool, pool.num_bytes) == (False, False, True, 10)
    assert slot not in pool.take_vacated()


def test_an_adapter_that_is_used_often_outlives_one_used_once_just_now() -> None:
    pool = AdapterPool(2, eviction=CostAwareEviction(clock=FakeClock()))
    for key in ("often", "often", "once"):
        pool.acquire(key, 10)
        pool.release(key)

    pool.acquire("new", 10)

    assert ("often" in pool, "once" in pool) == (True, False)


def test_of_two_adapters_that_take_as_long_to_load_the_smaller_stays() -> None:
    pool = AdapterPool(2, eviction=CostAwareEviction(clock=FakeClock()))
    for key, num_bytes in (("small", 1), ("large", 8)):
        pool.acquire(key, num_bytes)
        pool.release(key, seconds=0.5)

    pool.acquire("new", 1)

    assert ("small" in pool, "large" in pool) == (True, False)


def test_slots_that_had_to_be_emptied_are_named_once() -> None:
    pool = AdapterPool(2, max_bytes=10)
    slots = {pool.acquire("a", 5), pool.acquire("b", 5)}
    pool.release("a")
    pool.release("b")
    taken = pool.acquire("large", 10)

    assert {taken, *pool.take_vacated()} == slots
    assert pool.take_vacated() == []


def test_what_does_not_fit_beside_keys_in_use_throws_nobody_out() -> None:
    pool = AdapterPool(3, max_bytes=10)
    pool.acquire("used", 6)
    pool.acquire("idle", 2)
    pool.release("idle")

    assert pool.acquire("large", 5) is None
    assert "idle" in pool


def test_a_key_in_use_cannot_be_discarded() -> None:
    pool = AdapterPool(1)
    pool.acquire("a")
    with pytest.raises(ValueError, match="in use"):
        pool.discard("a")


def test_a_release_without_an_acquire_is_an_error() -> None:
    with pytest.raises(KeyError):
        AdapterPool(1).release("a")


class Slots(RuleBasedStateMachine):
    """Any sequence of acquire, release and discard against a plain model of it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = AdapterPool(3, max_bytes=10)
        self.held: dict[str, list[int]] = {}  # key -> the slot that each holder was given

    @rule(key=st.sampled_from(KEYS))
    def acquire(self, key: str) -> None:
        slot = self.pool.acquire(key, BYTES[key])
        if slot is None:
            assert len(self.held) == 3 or BYTES[key] + sum(map(BYTES.get, self.held)) > 10
            assert key not in self.held
            return
        self.held.setdefault(key, []).append(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.release(key)
        self.held[key].pop()
        if not self.held[key]:
            del self.held[key]

    @rule(key=st.sampled_from(KEYS))
    def discard(self, key: str) -> None:
        if key not in self.held:
            self.pool.discard(key)
            assert key not in self.pool

    @invariant()
    def the_books_balance(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_references == sum(map(len, self.held.values()))

    @invariant()
    def a_slot_in_use_does_not_move_and_is_not_shared(self) -> None:
        slots = [set(given) for given in self.held.values()]
        assert all(len(given) == 1 for given in slots)
        assert len(set().union(*slots)) == len(slots)

    def teardown(self) -> None:
        for key, holders in self.held.items():
            for _ in holders:
                self.pool.release(key)
        assert self.pool.num_references == 0
        self.pool.check_integrity()


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
