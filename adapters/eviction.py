"""Eviction: the order in which idle things leave memory, be they KV blocks or adapters.

Torch-free, and in this layer because the adapters' slots and the engine's blocks both need it.
"""

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

MIN_GARBAGE = 64  # dead heap entries that are not worth a clean-up


class RankedSet(Generic[Key]):
    """Keys in the order of their ranks, lowest first; equal ranks in the order of insertion.

    A binary heap with lazy deletion: every operation is O(log n) amortised, `lowest` mostly O(1).
    """

    def __init__(self) -> None:
        self._live: dict[Key, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._tick = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: Key) -> bool:
        return key in self._live

    def put(self, key: Key, rank: float) -> None:
        """Adds a key, or gives it another rank."""
        if (entry := self._live.get(key)) is not None and entry[0] == rank:
            return
        self._tick += 1
        self._live[key] = (rank, self._tick)
        heappush(self._heap, (rank, self._tick, key))
        if len(self._heap) > 2 * len(self._live) + MIN_GARBAGE:
            self._heap = [(*entry, key) for key, entry in self._live.items()]
            heapify(self._heap)

    def discard(self, key: Key) -> None:
        self._live.pop(key, None)

    def lowest(self) -> tuple[float, Key] | None:
        """The lowest rank and its key; None where there is no key."""
        while self._heap:
            rank, tick, key = self._heap[0]
            if self._live.get(key) == (rank, tick):
                return rank, key
            heappop(self._heap)
        return None
