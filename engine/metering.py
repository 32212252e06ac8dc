"""Metering: what each account's blocks, evictions and waits add up to. Torch-free."""

import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum


class EvictionCause(StrEnum):
    """Why a cached block had to leave."""

    CAPACITY = "capacity"  # another block was needed, and none was blank
    CEILING = "ceiling"  # its own account was at its ceiling
    CLAW_BACK = "claw_back"  # it lay in the unused floor of an account that came back for it
    RETIRED = "retired"  # its content can never be asked for again


class Integral:
    """The integral over time of a count that changes now and then, in O(1) per change.

    With changes d_i at times t_i, it is sum(d_i) * now - sum(d_i * t_i).
    """

    __slots__ = ("_moment", "count")

    def __init__(self) -> None:
        self.count = 0
        self._moment = 0.0

    def add(self, change: int, now: float) -> None:
        self.count += change
        self._moment += change * now

    def at(self, now: float) -> float:
        return max(0.0, self.count * now - self._moment)


class Meter:
    """One account's counters. Integrals are in block-seconds, the other times in seconds."""

    def __init__(self) -> None:
        self.held = Integral()  # blocks in use that it pays for
        self.shared = Integral()  # of these, with more than one holder
        self.cached = Integral()
        self.used = Integral()  # entries in the block tables of its sequences, whoever pays
        self.evictions: Counter[EvictionCause] = Counter()
        self.num_preemptions = 0
        self.swapped_out_bytes = 0
        self.swapped_in_bytes = 0
        self.queue_seconds = 0.0
        self.num_queued = 0


class Metering:
    """The meters of all accounts, on one clock that starts with the engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._meters: dict[str, Meter] = {}

    def now(self) -> float:
        """Seconds since the engine's start."""
        return self._clock() - self._start

    def of(self, account: str) -> Meter:
        meter = self._meters.get(account)
        if meter is None:
            meter = self._meters[account] = Meter()
        return meter

    def note_charge(self, payer: str, held: int, cached: int) -> None:
        """So many blocks more, or fewer where negative, are charged to an account."""
        meter, now = self.of(payer), self.now()
        if held:
            meter.held.add(held, now)
        if cached:
            meter.cached.add(cached, now)

    def note_shared(self, payer: str, change: int) -> None:
        """A block of the account has a second holder (1), or has one holder again (-1)."""
        self.of(payer).shared.add(change, self.now())

    def note_use(self, holder: str, change: int) -> None:
        """A sequence of the account has taken (1) or given back (-1) a block."""
        self.of(holder).used.add(change, self.now())

    def note_eviction(self, account: str, cause: EvictionCause) -> None:
        self.of(account).evictions[cause] += 1

    def note_swap(self, account: str, bytes_out: int = 0, bytes_in: int = 0) -> None:
        """Bytes of the account's blocks that left for host memory or disk, or came back."""
        meter = self.of(account)
        meter.swapped_out_bytes += bytes_out
        meter.swapped_in_bytes += bytes_in

    def note_wait(self, account: str, seconds: float) -> None:
        """A sequence has waited so long to be admitted for the first time."""
        meter = self.of(account)
        meter.queue_seconds += seconds
        meter.num_queued += 1

    def note_preemption(self, account: str) -> None:
        self.of(account).num_preemptions += 1
