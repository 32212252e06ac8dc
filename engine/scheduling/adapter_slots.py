"""AdapterSlots: which waiting sequence may take an adapter slot, so that none waits for ever."""

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
        """Starts loading if need be, without waiting; whether the weights are in host memory."""

    def bytes_to_load(self, ref: AdapterRef) -> int:
        """Bytes that `acquire` would place on the device now; 0 where they are there."""

    def acquire(self, ref: AdapterRef) -> int | None:
        """A slot that holds the adapter until `release`, or None while there is none."""

    def release(self, ref: AdapterRef) -> None: ...

    def take_loads(self) -> list[AdapterLoad]:
        """What has come into slots or left them since the last call; the step does it first."""


@dataclass(frozen=True)
class _Drain:
    """Contents' digests: those `leaving` take no new sequences until `waiting` has a slot."""

    waiting: str
    leaving: frozenset[str]


class AdapterSlots:
    """Takes and returns slots for sequences, with a starvation guard.

    Adapters in slots are served first, since that costs nothing. But once a loaded adapter has
    waited `max_wait` seconds for a slot, the resident adapter with the fewest running sequences
    takes no new ones until its slot is free, and what is freed goes to nobody else. Where that does
    not free memory enough, the next one is drained. So a wait ends after `max_wait` and the longest
    running sequence of each adapter that must leave.
    """

    def __init__(
        self, slots: SlotProvider, max_wait: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._slots = slots
        self._max_wait = max_wait
        self._clock = clock
        # Contents, not names: one content sits in one slot, whoever uses it.
        self._waiting_since: dict[str, float] = {}
        self._draining: _Drain | None = None

    def bytes_to_load(self, sequence: Sequence) -> int:
        """Bytes of the sequence's adapter that `open` would have to place on the device."""
        return 0 if sequence.adapter is None else self._slots.bytes_to_load(sequence.adapter)

    def open(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Gives the sequence its slot if it can have one now; the base model needs none."""
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
        """What the next step must place before it computes; the caller sees to it, once."""
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
        """Ends the waits of adapters other than those that sequences still wait for."""
        digests = {adapter.digest for adapter in wanted}
        self._waiting_since = {d: t for d, t in self._waiting_since.items() if d in digests}
        if self._draining is not None and self._draining.waiting not in digests:
            self._draining = None

    def _is_barred(self, digest: str, drain: _Drain, running: Iterable[Sequence]) -> bool:
        """Whether a drain keeps out an adapter: one that is to leave, or one that is not in use."""
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
    """How many sequences run on each content."""
    return Counter(s.adapter.digest for s in running if s.adapter is not None)
