"""Eviction: the order in which idle KV blocks and adapters leave memory.

Torch-free, and in this layer because the adapters' slots and the engine's blocks both need it.
"""

import math
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

UNUSED = -math.inf  # the score of what has not been used yet
MIN_GARBAGE = 64  # dead heap entries that are not worth a clean-up


class EvictionPolicy(ABC):
    """Scores idle entries by their uses; the lowest score is evicted first.

    A score changes only when its entry is used, so idle entries keep their order and fit in a heap.
    """

    @abstractmethod
    def score(self, previous: float, cost: float) -> float:
        """Returns the score after one more use.

        Args:
            previous: the score before it; `UNUSED` at the first.
            cost: what getting the thing back would take, per byte, above 0; in one unit for all
                things of one memory.
        """


class LRUEviction(EvictionPolicy):
    """Evicts the least recently used entry first."""

    def __init__(self) -> None:
        self._uses = count()

    def score(self, previous: float, cost: float) -> float:
        return next(self._uses)


class CostAwareEviction(EvictionPolicy):
    """Evicts the entry worth least: chance of need x cost of getting it back / bytes.

    The chance of need is estimated from past uses, each of which counts half after every half-life:
    between frequency (a long half-life) and recency (a short one). This is LRFU (Lee et al., IEEE
    Transactions on Computers 50(12), 2001) with each use weighted by its cost, as in
    GreedyDual-Size (Cao and Irani, USITS 1997). All scores fade at one rate, so their order is
    fixed between uses; the score is log2(sum over uses of cost * 2 ** (time / half-life)).

    A use of a block is a use of all blocks before it. So a prefix never scores below its
    continuation, and a chain of blocks is evicted from its end.
    """

    def __init__(
        self, half_life: float = 120.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`half_life`: seconds after which a past use counts half."""
        self._half_life = half_life
        self._clock = clock
        self._start = clock()

    def score(self, previous: float, cost: float) -> float:
        use = math.log2(cost) + (self._clock() - self._start) / self._half_life
        high, low = max(previous, use), min(previous, use)
        return high + math.log2(1 + 2 ** (low - high))


class EvictionOrder(Generic[Key]):
    """Keys in the order of their scores, lowest first; equal scores in the order of insertion.

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

    def put(self, key: Key, score: float) -> None:
        """Adds a key, or changes its score."""
        if (entry := self._live.get(key)) is not None and entry[0] == score:
            return
        self._tick += 1
        self._live[key] = (score, self._tick)
        heappush(self._heap, (score, self._tick, key))
        if len(self._heap) > 2 * len(self._live) + MIN_GARBAGE:
            self._heap = [(*entry, key) for key, entry in self._live.items()]
            heapify(self._heap)

    def discard(self, key: Key) -> None:
        self._live.pop(key, None)

    def lowest(self) -> tuple[float, Key] | None:
        """Returns the lowest score and its key; None where there is no key."""
        while self._heap:
            score, tick, key = self._heap[0]
            if self._live.get(key) == (score, tick):
                return score, key
            heappop(self._heap)
        return None


class PastScores(Generic[Key]):
    """The scores of evicted entries, so that their uses still count when they come back.

    Without them, an entry that returns more rarely than the memory turns over would look like one
    that is used once. Only the newest `capacity` scores are kept.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._scores: OrderedDict[Key, float] = OrderedDict()

    def keep(self, key: Key, score: float) -> None:
        self._scores[key] = score
        if len(self._scores) > self._capacity:
            self._scores.popitem(last=False)

    def take(self, key: Key) -> float:
        """Returns and removes the score with which the key left; `UNUSED` where it is not known."""
        return self._scores.pop(key, UNUSED)
