"""The books are proved while the engine is idle, and that takes little of the time."""

import pytest
from support.clocks import FakeClock
from support.engine.kv import FULL
from support.engine.scheduling import SchedulerHarness, Setup

from loraplex.engine.kv.idle_check import IdleCheck
from loraplex.engine.kv.manager import KVCacheManager


class SlowBooks(KVCacheManager):
    """Their check takes two seconds."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.num_checks = 0

    def check_integrity(self) -> None:
        self._clock.now += 2.0
        self.num_checks += 1


def test_a_hundredth_of_the_time_goes_into_checks() -> None:
    clock = FakeClock()
    books = SlowBooks(clock)
    check = IdleCheck(books, clock)

    for _ in range(1000):
        check.run()
        clock.now += 1.0

    assert books.num_checks == 5


def test_books_that_do_not_balance_are_found() -> None:
    harness = SchedulerHarness(Setup(num_blocks=8, groups=FULL))
    harness.kv.pool.blocks[1].ref_count = 1

    with pytest.raises(RuntimeError, match="block 1 is both free and held"):
        IdleCheck(harness.kv).run()
