"""AdapterPool: a fixed number of device slots, shared by more adapters than there are slots."""

from collections import OrderedDict


class AdapterPool:
    """Who sits in which slot. A slot in use never moves; idle adapters leave in LRU order.

    Keys are content digests, so one content takes one slot, however many names it has. The pool
    keeps the books only: the caller fills a slot when `acquire` gives one to a new key.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_evictions = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[str, int] = {}
        self._references: dict[str, int] = {}  # keys in use
        self._idle: OrderedDict[str, None] = OrderedDict()  # least recently used first

    def __contains__(self, key: str) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_references(self) -> int:
        return sum(self._references.values())

    def can_acquire(self, key: str) -> bool:
        return key in self._slots or bool(self._free) or bool(self._idle)

    def acquire(self, key: str) -> int | None:
        """Takes one reference on a key's slot.

        Returns:
            The slot, or None where every slot is in use by another key. A key that was not in the
            pool before gets a free slot, else that of the least recently used idle key.
        """
        if not self.can_acquire(key):
            return None
        if key not in self._slots:
            self._slots[key] = self._free.pop() if self._free else self._evict()
        self._idle.pop(key, None)
        self._references[key] = self._references.get(key, 0) + 1
        return self._slots[key]

    def release(self, key: str) -> None:
        """Gives one reference back. The key stays resident until its slot is needed.

        Raises:
            KeyError: the key has no reference.
        """
        self._references[key] -= 1
        if self._references[key] == 0:
            del self._references[key]
            self._idle[key] = None

    def discard(self, key: str) -> int | None:
        """Takes an idle key out of the pool and returns its slot; None where it is not resident.

        Raises:
            ValueError: the key is in use.
        """
        if key in self._references:
            raise ValueError("an adapter in use cannot leave its slot")
        if key not in self._slots:
            return None
        del self._idle[key]
        slot = self._slots.pop(key)
        self._free.append(slot)
        return slot

    def _evict(self) -> int:
        key, _ = self._idle.popitem(last=False)
        self.num_evictions += 1
        return self._slots.pop(key)

    def check_integrity(self) -> None:
        """Proves that every slot is free or held once, and every key in use or idle.

        Raises:
            RuntimeError: the books do not balance.
        """
        taken = sorted([*self._free, *self._slots.values()])
        if taken != list(range(self.num_slots)):
            raise RuntimeError(f"slots lost or given twice: {taken} of {self.num_slots}")
        if self._references.keys() & self._idle.keys():
            raise RuntimeError("an adapter is both in use and idle")
        if self._references.keys() | self._idle.keys() != self._slots.keys():
            raise RuntimeError("an adapter in a slot is neither in use nor idle")
        if any(count < 1 for count in self._references.values()):
            raise RuntimeError("an adapter in use has no reference")
