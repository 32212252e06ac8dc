"""FairLRU: an eviction order in which no account can flush another's entries."""

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
    """Entries of several accounts: the account with most loses first, its oldest entry first.

    An account thus keeps what it has as long as that is no more than what each larger account is
    left with: shares are max-min fair. Entries unused for `MAX_IDLE` leave before all others,
    whichever account has them: accounts may be gone, and some entries can never be asked for again.
    A pinned entry counts, but does not leave. Every operation is O(log n) in the number of
    accounts.
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
        """Returns the total size of each account's entries; only accounts that have some."""
        return {account: size for account, size in self._usage.items() if size}

    def add(self, key: K, account: str, size: int = 1) -> None:
        """Adds an entry, which counts as used now."""
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
        """Counts an entry as used now; a pinned one when it is unpinned."""
        if key in self._last_use:
            self.pin(key)
            self.unpin(key)

    def pin(self, key: K) -> None:
        """Keeps an entry from leaving until `unpin`."""
        del self._free[self._entries[key].account][key]
        del self._last_use[key]

    def unpin(self, key: K) -> None:
        """Lets a pinned entry leave again; it counts as used now."""
        self._set_free(key, self._entries[key].account)

    def newest_first(self) -> Iterator[K]:
        """Returns all entries that are not pinned, newest first."""
        return reversed(self._last_use)

    def victim(self, account: str | None = None) -> K | None:
        """Returns the entry to evict next, for a new one of `account` if there is one. None where
        all are pinned, or the others belong to accounts with no more than this one: pins are brief
        and must not cost these accounts their share."""
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
        """Returns the account's least recently used entry that is not pinned."""
        return next(iter(self._free[account]), None) if account in self._free else None

    def _true_largest(self) -> str | None:
        """Returns the account at the top of the heap, after correcting outdated entries."""
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
