"""Who has most gives first, and of that the oldest."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.engine.offload import Clock

from loraplex.engine.kv.offload.fair_lru import MAX_IDLE, FairLRU

ACCOUNTS = ["a", "b", "c"]
KEYS = st.integers(0, 9)


def filled(accounts: str) -> FairLRU[int]:
    """Entries 0, 1, ... of these accounts, in this order."""
    order: FairLRU[int] = FairLRU()
    for number, account in enumerate(accounts):
        order.add(number, account)
    return order


def test_the_largest_account_gives_its_oldest_entry() -> None:
    order = filled("babb")

    assert order.victim() == 0


def test_a_touched_entry_is_the_newest() -> None:
    order = filled("bb")

    order.touch(0)

    assert order.victim() == 1


def test_a_flood_of_one_account_leaves_the_others_what_they_have() -> None:
    order = filled("qqq")

    for number in range(10, 100):
        order.add(number, "flood")
        if len(order) > 8:
            victim = order.victim()
            assert victim is not None
            order.discard(victim)

    assert order.usage == {"q": 3, "flood": 5}


def test_a_held_entry_counts_but_does_not_leave() -> None:
    order = filled("aab")
    order.pin(0)
    order.pin(1)

    assert order.victim() == 2


def test_nothing_leaves_where_all_is_held() -> None:
    order = filled("ab")
    order.pin(0)
    order.pin(1)

    assert order.victim() is None


@pytest.mark.parametrize(("account", "victim"), [("a", 2), ("b", None), ("c", 2)])
def test_an_account_takes_from_itself_or_from_one_that_has_more(
    account: str, victim: int | None
) -> None:
    order = filled("bbaa")
    order.pin(0)
    order.pin(1)

    assert order.victim(account) == victim


def test_what_nobody_used_for_long_leaves_first_whoever_has_it() -> None:
    clock = Clock()
    order: FairLRU[int] = FairLRU(clock)
    for number, account in enumerate(["gone", "gone", "quiet"]):
        order.add(number, account)
    clock.now = MAX_IDLE / 2
    order.touch(2)

    clock.now = MAX_IDLE
    for number in range(10, 20):
        order.add(number, "busy")
        victim = order.victim("busy")
        assert victim is not None
        order.discard(victim)

    assert order.usage == {"quiet": 1, "busy": 2}


class FairLRUMachine(RuleBasedStateMachine):
    """Beside it a list of entries in the order of use, from which all can be counted."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.order: FairLRU[int] = FairLRU(self.clock)
        self.entries: dict[int, str] = {}  # its account
        self.last_use: dict[int, float] = {}
        self.held: set[int] = set()

    @rule(key=KEYS, account=st.sampled_from(ACCOUNTS))
    def add(self, key: int, account: str) -> None:
        if key not in self.entries:
            self.order.add(key, account, size=key + 1)
            self.entries[key] = account
            self.last_use[key] = self.clock.now

    @rule(key=KEYS)
    def discard(self, key: int) -> None:
        if self.entries.pop(key, None):
            self.order.discard(key)
            self.held.discard(key)

    @rule(key=KEYS)
    def pin(self, key: int) -> None:
        if key in self.entries and key not in self.held:
            self.order.pin(key)
            self.held.add(key)

    @rule(key=KEYS)
    def unpin(self, key: int) -> None:
        if key in self.held:
            self.order.unpin(key)
            self.held.remove(key)
            self.use(key)

    @rule(key=KEYS)
    def touch(self, key: int) -> None:
        if key in self.entries and key not in self.held:
            self.order.touch(key)
            self.use(key)

    def use(self, key: int) -> None:
        self.entries[key] = self.entries.pop(key)
        self.last_use[key] = self.clock.now

    @rule(seconds=st.sampled_from([1.0, MAX_IDLE]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def usage_is_the_sum_of_the_entries(self) -> None:
        usage = {a: sum(k + 1 for k, b in self.entries.items() if a == b) for a in ACCOUNTS}

        assert self.order.usage == {account: size for account, size in usage.items() if size}

    @invariant()
    def the_victim_is_idle_for_long_or_the_oldest_free_entry_of_the_largest_account(self) -> None:
        free = [key for key in self.entries if key not in self.held]
        victim = self.order.victim()

        if victim is None:
            assert not free
            return
        if self.clock.now - self.last_use[free[0]] >= MAX_IDLE:
            assert victim == free[0]
            return
        owner, usage = self.entries[victim], self.order.usage
        assert usage[owner] == max(usage[self.entries[key]] for key in free)
        assert victim == next(key for key in free if self.entries[key] == owner)


FairLRUMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestFairLRU = FairLRUMachine.TestCase
