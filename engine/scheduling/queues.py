"""WaitingQueue: the sequences that wait. TurnQueue: who of the contenders for a step comes next."""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from itertools import chain

from loraplex.adapters.manifest import AdapterRef
from loraplex.engine.scheduling.call_turns import CallTurns, Scope
from loraplex.engine.sequence import Sequence

Line = tuple[str, AdapterRef | None]  # the tenant and the adapter of all who stand in it


class WaitingQueue:
    """Each line is in order of rank. What keeps the first of a line from its turn mostly keeps all
    behind it, so that a step need only look at the heads, however many wait. To come and to go
    costs O(log n)."""

    def __init__(self, scope: Scope = lambda tenant: tenant) -> None:
        """`scope`: who of the tenants take turns as if they were one."""
        self._lines: dict[Line, list[Sequence]] = {}
        self._turns = CallTurns(scope)
        self._num_waiting: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._num_waiting.total()

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._lines.values())

    @property
    def lines(self) -> Mapping[Line, list[Sequence]]:
        """None is empty. For looking only; they change as sequences come and go."""
        return self._lines

    @property
    def tenants(self) -> set[str]:
        return {tenant for tenant, _ in self._lines}

    @property
    def adapters(self) -> set[AdapterRef]:
        return {adapter for _, adapter in self._lines if adapter is not None}

    def num_of(self, tenant: str) -> int:
        """How many of a tenant's wait."""
        return self._num_waiting[tenant]

    def enter(self, sequence: Sequence) -> None:
        """Adds one that has just arrived."""
        sequence.turn = self._turns.turn_of_new(sequence)
        self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """Adds one that has a turn already."""
        line = self._lines.setdefault(line_of(sequence), [])
        insort(line, sequence, key=_rank)
        self._num_waiting[sequence.tenant] += 1
        self._turns.note_waits(sequence)

    def begin(self, sequence: Sequence) -> None:
        """Removes one whose turn it is; who arrives later comes behind it."""
        self.remove(sequence)
        self._turns.note_begins(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Raises ValueError where it does not wait."""
        line = self._lines.get(line_of(sequence), [])
        first = bisect_left(line, sequence.rank, key=_rank)  # choices of one request have one rank
        del line[line.index(sequence, first)]
        if not line:
            del self._lines[line_of(sequence)]
        self._num_waiting[sequence.tenant] -= 1
        if not self._num_waiting[sequence.tenant]:
            del self._num_waiting[sequence.tenant]
        self._turns.note_gone(sequence)


def line_of(sequence: Sequence) -> Line:
    return sequence.tenant, sequence.adapter


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank


class TurnQueue:
    """Running sequences first, then waiting ones, each by rank; a turn costs O(log lines)."""

    def __init__(
        self,
        running: Iterable[Sequence],
        lines: Iterable[list[Sequence]],
        may_begin: Callable[[Sequence], bool],
    ) -> None:
        """
        Args:
            running: that have more input to compute.
            lines: of the waiting ones, none empty; who takes its turn leaves them meanwhile.
            may_begin: asked of the head of a line. Where it may not, the whole line has gone.
        """
        self._running = deque(sorted(running, key=lambda sequence: sequence.rank))
        self._heads = [(line[0].rank, 0, line) for line in lines]  # with its place in the line
        heapify(self._heads)
        self._may_begin = may_begin

    def head(self) -> Sequence | None:
        """Whose turn it is; None where nobody is left."""
        if self._running:
            return self._running[0]
        while self._heads:
            _, place, line = self._heads[0]
            if self._may_begin(line[place]):
                return line[place]
            heappop(self._heads)
        return None

    def advance(self, sequence: Sequence) -> None:
        """The head has had its turn, whatever came of it."""
        if self._running:
            self._running.popleft()
            return
        _, place, line = self._heads[0]
        if place < len(line) and line[place] is sequence:
            place += 1  # it still waits, and lets those behind it pass
        if place < len(line):
            heapreplace(self._heads, (line[place].rank, place, line))
        else:
            heappop(self._heads)
