"""AdapterPool: device slots and bytes, shared by more adapters than fit."""

from loraplex.adapters.residency.eviction import (
    EvictionOrder,
    EvictionPolicy,
    LRUEviction,
    PastScores,
)

MIN_SECONDS = 1e-6  # no load is free
PAST_PER_SLOT = 64  # evicted adapters whose scores are kept, for each slot


class AdapterPool:
    """Assigns slots to adapters. A slot in use never moves; idle adapters are evicted in the order
    of `eviction`.

    Keys are content digests, so one content takes one slot, however many names it has. The pool
    only keeps the books: the caller fills a slot when `acquire` assigns it to a new key, and
    empties the slots that `take_vacated` returns.

    Args:
        num_slots: adapters that can be resident at once.
        max_bytes: what they may take together; None: whatever they take.
        eviction: scores idle adapters; None: the least recently used leaves first.
    """

    def __init__(
        self,
        num_slots: int,
        max_bytes: int | None = None,
        eviction: EvictionPolicy | None = None,
    ) -> None:
        self.num_slots = num_slots
        self.max_bytes = max_bytes
        self.num_evictions = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._vacated: set[int] = set()  # free slots whose content is still there
        self._slots: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self._references: dict[str, int] = {}  # keys in use
        self._idle: EvictionOrder[str] = EvictionOrder()
        self._scores: dict[str, float] = {}
        self._past_scores: PastScores[str] = PastScores(PAST_PER_SLOT * num_slots)
        self._eviction = eviction or LRUEviction()

    def __contains__(self, key: str) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_references(self) -> int:
        return sum(self._references.values())

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes.values())

    def can_acquire(self, key: str, num_bytes: int = 0) -> bool:
        if key in self._slots:
            return True
        held = sum(self._bytes[other] for other in self._references)
        return bool(self._free or len(self._idle)) and self._fit(held + num_bytes)

    def acquire(self, key: str, num_bytes: int = 0) -> int | None:
        """Takes one reference on a key's slot.

        Args:
            num_bytes: what the key takes on the device.

        Returns:
            The slot, or None where too many slots or bytes are in use by other keys. A key that was
            not in the pool before gets a free slot; idle keys of the lowest score leave until
            there is one and its bytes fit.
        """
        if not self.can_acquire(key, num_bytes):
            return None
        if key not in self._slots:
            while not self._free or not self._fit(self.num_bytes + num_bytes):
                self._evict()
            self._slots[key] = self._free.pop()
            self._bytes[key] = num_bytes
            self._scores[key] = self._past_scores.take(key)
            self._vacated.discard(self._slots[key])
        self._idle.discard(key)
        self._references[key] = self._references.get(key, 0) + 1
        return self._slots[key]

    def take_vacated(self) -> list[int]:
        """Returns the free slots whose content was evicted and must be removed from the device,
        each once."""
        vacated, self._vacated = sorted(self._vacated), set()
        return vacated

    def release(self, key: str, seconds: float = 1.0) -> None:
        """Releases one reference. The key stays resident until its slot is needed.

        Args:
            seconds: what it would take to load the key again.

        Raises:
            KeyError: the key has no reference.
        """
        self._references[key] -= 1
        cost = max(seconds, MIN_SECONDS) / max(1, self._bytes[key])
        self._scores[key] = self._eviction.score(self._scores[key], cost)
        if self._references[key] == 0:
            del self._references[key]
            self._idle.put(key, self._scores[key])

    def discard(self, key: str) -> int | None:
        """Evicts an idle key and returns its slot; None where it is not resident.

        Raises:
            ValueError: the key is in use.
        """
        if key in self._references:
            raise ValueError("an adapter in use cannot leave its slot")
        if key not in self._slots:
            return None
        return self._remove(key)

    def _evict(self) -> None:
        lowest = self._idle.lowest()
        if lowest is None:
            raise RuntimeError("no adapter is idle")
        self.num_evictions += 1
        self._vacated.add(self._remove(lowest[1]))

    def _remove(self, key: str) -> int:
        self._idle.discard(key)
        self._past_scores.keep(key, self._scores.pop(key))
        del self._bytes[key]
        slot = self._slots.pop(key)
        self._free.append(slot)
        return slot

    def _fit(self, num_bytes: int) -> bool:
        return self.max_bytes is None or num_bytes <= self.max_bytes

    def check_integrity(self) -> None:
        """Proves that every slot is free or held once, and every key in use or idle.

        Raises:
            RuntimeError: the books do not balance.
        """
        taken = sorted([*self._free, *self._slots.values()])
        if taken != list(range(self.num_slots)):
            raise RuntimeError(f"slots lost or given twice: {taken} of {self.num_slots}")
        if any((key in self._references) == (key in self._idle) for key in self._slots):
            raise RuntimeError("an adapter in a slot is both in use and idle, or neither")
        if len(self._references) + len(self._idle) != len(self._slots):
            raise RuntimeError("an adapter without a slot is in use or idle")
        if self._bytes.keys() != self._slots.keys() or not self._fit(self.num_bytes):
            raise RuntimeError("the bytes of resident adapters are wrong, or too many")
        if any(count < 1 for count in self._references.values()):
            raise RuntimeError("an adapter in use has no reference")
