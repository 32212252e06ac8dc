"""FairLRU: which entry leaves next, so that no account can flush another's."""

import heapq
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_IDLE = 3600.0  # seconds without a use after which an entry has no share to be part of

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class _Entry:
    account: str
    size: int


class FairLRU(Generic[K]):
    """Entries of several accounts: the account that has most gives first, its oldest entry first.

    So an account keeps what it has as long as that is no more than what each larger one is left
    with: shares are max-min fair. What nobody has used for `MAX_IDLE` leaves before all others,
    whoever has it: accounts may be gone, and entries such that nobody can ask for them any more. A
    held entry counts, but does not leave. Everything is O(log n) in the number of accounts.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[K, _Entry] = {}
        self._last_use: OrderedDict[K, float] = OrderedDict()  # of free ones, oldest first
        self._free: defaultdict[str, OrderedDict[K, None]] = defaultdict(OrderedDict)
        self._usage: defaultdict[str, int] = defaultdict(int)
        self._largest: list[tuple[int, str]] = []  # heap of (-usage, account), true or too large
        self._in_heap: dict[str, int] = {}  # the usage that stands there

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def usage(self) -> dict[str, int]:
        """The size of each account's entries together; accounts without any are left out."""
        return {account: size for account, size in self._usage.items() if size}

    def add(self, key: K, account: str, size: int = 1) -> None:
        """Takes in a new entry, which counts as used now."""
        self._entries[key] = _Entry(account, size)
        self._set_free(key, account)
        self._usage[account] += size
        if self._usage[account] > self._in_heap.get(account, 0):
            self._push(account)

    def discard(self, key: K) -> None:
        entry = self._entries.pop(key)
        self._free[entry.account].pop(key, None)
        self._last_use.pop(key, None)
        self._usage[entry.account] -= entry.size
        if not self._usage[entry.account]:
            del self._usage[entry.account], self._free[entry.account]

    def touch(self, key: K) -> None:
        """Counts an entry as used now; a held one does so when it is let go."""
        if key in self._last_use:
            self.pin(key)
            self.unpin(key)

    def pin(self, key: K) -> None:
        """Keeps an entry from leaving until `unpin`."""
        del self._free[self._entries[key].account][key]
        del self._last_use[key]

    def unpin(self, key: K) -> None:
        """Lets a held entry leave again; it counts as used now."""
        self._set_free(key, self._entries[key].account)

    def newest_first(self) -> Iterator[K]:
        """All entries that are not held."""
        return reversed(self._last_use)

    def victim(self, account: str | None = None) -> K | None:
        """The entry to leave next, for a new one of `account` if there is one. None where all are
        held, or those that are not belong to accounts that have no more than this one: what others
        hold for a moment must not cost these their share."""
        oldest = next(iter(self._last_use), None)
        if oldest is not None and self._clock() - self._last_use[oldest] >= MAX_IDLE:
            return oldest
        skipped: list[str] = []
        found: K | None = None
        while (largest := self._true_largest()) is not None:
            if account is not None and self._usage[largest] <= self._usage.get(account, 0):
                found = self._oldest(account)
                break
            found = self._oldest(largest)
            if found is not None:
                break
            heapq.heappop(self._largest)
            skipped.append(largest)
        for name in skipped:
            self._push(name)
        return found

    def _set_free(self, key: K, account: str) -> None:
        self._free[account][key] = None
        self._last_use[key] = self._clock()

    def _oldest(self, account: str) -> K | None:
        """The account's entry that was used longest ago and is not held."""
        return next(iter(self._free[account]), None) if account in self._free else None

    def _true_largest(self) -> str | None:
        """The account at the top of the heap, once what stands there is true."""
        while self._largest:
            size, account = self._largest[0]
            usage = self._usage.get(account, 0)
            if usage == -size and self._in_heap.get(account) == usage:
                return account
            heapq.heappop(self._largest)
            if self._in_heap.get(account) == -size:
                del self._in_heap[account]
                if usage:
                    self._push(account)
        return None

    def _push(self, account: str) -> None:
        self._in_heap[account] = self._usage[account]
        heapq.heappush(self._largest, (-self._usage[account], account))
