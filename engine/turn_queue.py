"""TurnQueue: who of some contenders for a step's tokens comes next."""

from collections import deque
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heapreplace

from loraplex.engine.sequence import Sequence


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
