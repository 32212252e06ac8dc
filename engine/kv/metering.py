"""Metering: the sums of each account's blocks, evictions and waits. Torch-free."""

import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum


class EvictionCause(StrEnum):
    """Why a cached block was evicted."""

    CAPACITY = "capacity"  # another block was needed, and none was blank
    CEILING = "ceiling"  # its own account was at its ceiling
    CLAW_BACK = "claw_back"  # it lay in the unused floor of an account that came back for it
    RETIRED = "retired"  # its content can never be asked for again


class Integral:
    """The integral over time of a count that changes now and then, in O(1) per change.

    It never falls, not even by a rounding error: a scraper takes any fall for a restart. So the
    difference of two integrals is no substitute for a third.
    """

    __slots__ = ("_area", "_since", "count")

    def __init__(self) -> None:
        self.count = 0
        self._area = 0.0
        self._since = 0.0

    def add(self, change: int, now: float) -> None:
        self._area, self._since = self.at(now), now
        self.count += change

    def at(self, now: float) -> float:
        return self._area + self.count * (now - self._since)


class Meter:
    """One account's counters. Integrals are in block-seconds, the other times in seconds."""

    def __init__(self) -> None:
        self.private = Integral()  # blocks in use that it pays for, with one holder
        self.shared = Integral()  # the same, with more than one
        self.saved = Integral()  # blocks that its sequences use beyond those that it pays for
        self.cached = Integral()
        self.num_used = 0  # entries in its sequences' block tables, whichever account pays
        self.evictions: Counter[EvictionCause] = Counter()
        self.num_preemptions = 0
        self.offloaded_bytes = 0
        self.fetched_bytes = 0
        self.queue_seconds = 0.0
        self.num_queued = 0

    @property
    def num_held(self) -> int:
        """Returns the blocks in use that the account pays for."""
        return self.private.count + self.shared.count

    def update_saved(self, now: float) -> None:
        self.saved.add(max(0, self.num_used - self.num_held) - self.saved.count, now)


class Metering:
    """The meters of all accounts, on one clock that starts with the engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._meters: dict[str, Meter] = {}

    def now(self) -> float:
        """Returns the seconds since the engine's start."""
        return self._clock() - self._start

    def of(self, account: str) -> Meter:
        meter = self._meters.get(account)
        if meter is None:
            meter = self._meters[account] = Meter()
        return meter

    def note_charge(self, payer: str, held: int, cached: int) -> None:
        """Charges so many more blocks to an account, or fewer where negative."""
        meter, now = self.of(payer), self.now()
        if held:
            meter.private.add(held, now)
            meter.update_saved(now)
        if cached:
            meter.cached.add(cached, now)

    def note_shared(self, payer: str, change: int) -> None:
        """Records that a block of the account gained a second holder (1), or lost it again (-1)."""
        meter, now = self.of(payer), self.now()
        meter.private.add(-change, now)
        meter.shared.add(change, now)

    def note_use(self, holder: str, change: int) -> None:
        """Records that a sequence of the account took (1) or released (-1) a block."""
        meter = self.of(holder)
        meter.num_used += change
        meter.update_saved(self.now())

    def note_eviction(self, account: str, cause: EvictionCause) -> None:
        self.of(account).evictions[cause] += 1

    def note_offload(self, account: str, bytes_out: int = 0, bytes_in: int = 0) -> None:
        """Records bytes of the account's blocks that were offloaded to host memory or disk, or
        fetched."""
        meter = self.of(account)
        meter.offloaded_bytes += bytes_out
        meter.fetched_bytes += bytes_in

    def note_wait(self, account: str, seconds: float) -> None:
        """Records how long a sequence waited to be admitted for the first time."""
        meter = self.of(account)
        meter.queue_seconds += seconds
        meter.num_queued += 1

    def note_preemption(self, account: str) -> None:
        self.of(account).num_preemptions += 1
