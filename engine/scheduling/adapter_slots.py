"""AdapterSlots: admits waiting sequences to adapter slots without letting any of them starve."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from loraplex.adapters.manifest import AdapterLoad, AdapterRef
from loraplex.engine.sequence import Sequence


class SlotProvider(Protocol):
    """The part of the LoRA manager that hands out device slots."""

    def prepare(self, ref: AdapterRef) -> bool:
        """Starts loading the adapter where needed, without waiting; returns whether its weights are
        in host memory."""

    def bytes_to_load(self, ref: AdapterRef) -> int:
        """Returns the bytes that `acquire` would place on the device now; 0 where they are there
        already."""

    def acquire(self, ref: AdapterRef) -> int | None:
        """Returns a slot that holds the adapter until `release`, or None while no slot is
        available."""

    def release(self, ref: AdapterRef) -> None: ...

    def take_loads(self) -> list[AdapterLoad]:
        """Returns the changes to the slots since the last call; the step applies them first."""


@dataclass(frozen=True)
class _Drain:
    """Content digests being drained: those `leaving` take no new sequences until `waiting` has a
    slot."""

    waiting: str
    leaving: frozenset[str]


class AdapterSlots:
    """Takes and returns slots for sequences, with a starvation guard.

    Adapters that are resident are served first, since that costs nothing. But once a loaded adapter
    has waited `max_wait` seconds for a slot, the resident adapter with the fewest running sequences
    admits no new ones until its slot is free, and the freed slot goes to the waiting adapter alone.
    Where that does not free enough memory, the next adapter is drained. A wait therefore ends after
    `max_wait` plus the longest running sequence of each adapter that has to leave.
    """

    def __init__(
        self, slots: SlotProvider, max_wait: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._slots = slots
        self._max_wait = max_wait
        self._clock = clock
        # Contents, not names: one content has one slot, whichever sequences use it.
        self._waiting_since: dict[str, float] = {}
        self._draining: _Drain | None = None

    def bytes_to_load(self, sequence: Sequence) -> int:
        """Returns the bytes of the sequence's adapter that `open` would have to place on the
        device."""
        return 0 if sequence.adapter is None else self._slots.bytes_to_load(sequence.adapter)

    def open(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Gives the sequence its slot if one is available now; the base model needs none."""
        ref = sequence.adapter
        if ref is None:
            return True
        if not self._slots.prepare(ref):
            return False
        if self._draining is not None and self._is_barred(ref.digest, self._draining, running):
            return False
        slot = self._slots.acquire(ref)
        if slot is None:
            self._note_wait(ref.digest, running)
            return False
        sequence.adapter_slot = slot
        self._waiting_since.pop(ref.digest, None)
        if self._draining is not None and self._draining.waiting == ref.digest:
            self._draining = None
        return True

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """Returns what the next step must place before it computes; the caller applies it exactly
        once."""
        return tuple(self._slots.take_loads())

    def retain_slot(self, parent: Sequence, child: Sequence) -> None:
        """Makes a forked sequence a holder of its parent's slot."""
        if parent.adapter is not None and self._slots.acquire(parent.adapter) != child.adapter_slot:
            raise RuntimeError("an adapter moved while a sequence was using it")

    def close(self, sequence: Sequence) -> None:
        """Returns the sequence's slot, if it has one."""
        if sequence.adapter is not None and sequence.adapter_slot >= 0:
            self._slots.release(sequence.adapter)
            sequence.adapter_slot = -1

    def forget_absent(self, wanted: Iterable[AdapterRef]) -> None:
        """Ends the waits of all adapters that no waiting sequence uses any more."""
        digests = {adapter.digest for adapter in wanted}
        self._waiting_since = {d: t for d, t in self._waiting_since.items() if d in digests}
        if self._draining is not None and self._draining.waiting not in digests:
            self._draining = None

    def _is_barred(self, digest: str, drain: _Drain, running: Iterable[Sequence]) -> bool:
        """Returns whether a drain bars an adapter: one that has to leave, or one that is not in
        use."""
        if digest == drain.waiting:
            return False
        return digest in drain.leaving or digest not in _users(running)

    def _note_wait(self, digest: str, running: Iterable[Sequence]) -> None:
        since = self._waiting_since.setdefault(digest, self._clock())
        users = _users(running)
        drain = self._draining or _Drain(digest, frozenset())
        if drain.leaving & users.keys():
            return
        if users and self._clock() - since >= self._max_wait:
            next_to_leave = min(users, key=lambda user: users[user])
            self._draining = _Drain(drain.waiting, drain.leaving | {next_to_leave})


def _users(running: Iterable[Sequence]) -> Counter[str]:
    """Counts the running sequences of each content."""
    return Counter(s.adapter.digest for s in running if s.adapter is not None)
