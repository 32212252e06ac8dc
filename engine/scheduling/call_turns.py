"""CallTurns: orders the prompts of one API call among other calls."""

from collections import Counter
from collections.abc import Callable

from loraplex.engine.sequence import Sequence

Scope = Callable[[str], str]  # the tenants whose calls take turns with each other, named alike


class CallTurns:
    """Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) between calls.

    A new call gets the turn of the sequence that was admitted last. Each further prompt of the same
    call gets a turn that is later by the rows of the prompt before it. Calls of one prompt are
    therefore served in order of arrival, and a call of many prompts or choices lets calls that
    arrive meanwhile pass.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._now: dict[str, int] = {}  # by scope
        self._next: dict[tuple[str, str], int] = {}  # by scope and call, while some of it waits
        self._num_waiting: Counter[tuple[str, str]] = Counter()

    def turn_for(self, sequence: Sequence) -> int:
        """Returns the turn of a sequence that has just arrived."""
        now = self._now.get(self._scope(sequence.tenant), 0)
        key = self._key(sequence)
        if key is None:
            return now
        turn = max(now, self._next.get(key, now))
        self._next[key] = turn + sequence.num_rows
        return turn

    def note_waits(self, sequence: Sequence) -> None:
        key = self._key(sequence)
        if key is not None:
            self._num_waiting[key] += 1

    def note_gone(self, sequence: Sequence) -> None:
        """Records that the sequence no longer waits, for whatever reason."""
        key = self._key(sequence)
        if key is None:
            return
        self._num_waiting[key] -= 1
        if not self._num_waiting[key]:
            del self._num_waiting[key]
            self._next.pop(key, None)

    def note_begins(self, sequence: Sequence) -> None:
        scope = self._scope(sequence.tenant)
        self._now[scope] = max(self._now.get(scope, 0), sequence.turn)

    def _key(self, sequence: Sequence) -> tuple[str, str] | None:
        """Returns None for a sequence that is a call of its own."""
        if sequence.call is None:
            return None
        return self._scope(sequence.tenant), sequence.call
