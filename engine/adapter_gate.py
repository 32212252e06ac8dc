"""AdapterGate: which waiting sequence may take an adapter slot, so that none waits for ever."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

from loraplex.adapters.manifest import AdapterRef
from loraplex.engine.sequence import Sequence


class AdapterSlots(Protocol):
    """The part of the LoRA manager that hands out device slots."""

    def prepare(self, ref: AdapterRef) -> bool:
        """Starts loading if need be, without waiting; whether the weights are in host memory."""

    def acquire(self, ref: AdapterRef) -> int | None:
        """A slot that holds the adapter until `release`, or None while there is none."""

    def release(self, ref: AdapterRef) -> None: ...


class AdapterGate:
    """Takes and returns slots for sequences, with a starvation guard.

    Adapters in slots are served first, since that costs nothing. But once a loaded adapter has
    waited `max_wait` seconds for a slot, the resident adapter with the fewest running sequences
    takes no new ones until its slot is free. So a wait ends after `max_wait` and the longest
    running sequence.
    """

    def __init__(
        self, slots: AdapterSlots, max_wait: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._slots = slots
        self._max_wait = max_wait
        self._clock = clock
        self._waiting_since: dict[AdapterRef, float] = {}
        self._draining: tuple[AdapterRef, AdapterRef] | None = None  # (for whom, who drains)

    def open(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Gives the sequence its slot if it can have one now; the base model needs none."""
        ref = sequence.adapter
        if ref is None:
            return True
        if not self._slots.prepare(ref) or (self._draining and self._draining[1] == ref):
            return False
        slot = self._slots.acquire(ref)
        if slot is None:
            self._note_wait(ref, running)
            return False
        sequence.adapter_slot = slot
        self._waiting_since.pop(ref, None)
        if self._draining and self._draining[0] == ref:
            self._draining = None
        return True

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Makes a forked sequence a holder of its parent's slot."""
        if parent.adapter is not None and self._slots.acquire(parent.adapter) != child.adapter_slot:
            raise RuntimeError("an adapter moved while a sequence was using it")

    def close(self, sequence: Sequence) -> None:
        """Returns the sequence's slot, if it has one."""
        if sequence.adapter is not None and sequence.adapter_slot >= 0:
            self._slots.release(sequence.adapter)
            sequence.adapter_slot = -1

    def forget_absent(self, waiting: Iterable[Sequence]) -> None:
        """Ends the waits of adapters that no sequence waits for any more."""
        wanted = {sequence.adapter for sequence in waiting}
        self._waiting_since = {r: t for r, t in self._waiting_since.items() if r in wanted}
        if self._draining and self._draining[0] not in wanted:
            self._draining = None

    def _note_wait(self, ref: AdapterRef, running: Iterable[Sequence]) -> None:
        since = self._waiting_since.setdefault(ref, self._clock())
        if self._draining is None and self._clock() - since >= self._max_wait:
            users = Counter(s.adapter for s in running if s.adapter is not None)
            if users:
                self._draining = (ref, min(users, key=lambda user: users[user]))
