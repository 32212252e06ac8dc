"""Promises: blocks that running sequences were admitted for and do not have yet."""

from collections import Counter
from collections.abc import Callable, Collection

from loraplex.engine.sequence import Sequence


class Promises:
    """Sums the promised blocks within one step; recounts a sequence only where its blocks have
    changed."""

    def __init__(self, running: Collection[Sequence], count: Callable[[Sequence], int]) -> None:
        """
        Args:
            running: changes as sequences begin and end.
            count: blocks that were promised to a running sequence.
        """
        self._running = running
        self._count = count
        self._known: dict[Sequence, int] = {}

    def by_account(self) -> Counter[str]:
        """Returns the blocks by the account that will pay for them."""
        total: Counter[str] = Counter()
        for sequence in self._running:
            if sequence not in self._known:
                self._known[sequence] = self._count(sequence)
            total[sequence.tenant] += self._known[sequence]
        return total

    def note_allocated(self, sequence: Sequence) -> None:
        """Records that the sequence has been given some of its blocks."""
        self._known.pop(sequence, None)
