"""Promises: blocks that running sequences were admitted for, and have not got yet."""

from collections import Counter
from collections.abc import Callable, Collection

from loraplex.engine.sequence import Sequence


class Promises:
    """Adds up within one step what is promised; counts a sequence anew only where its blocks have
    changed since."""

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
        """Blocks by the account that is going to pay for them."""
        total: Counter[str] = Counter()
        for sequence in self._running:
            if sequence not in self._known:
                self._known[sequence] = self._count(sequence)
            total[sequence.tenant] += self._known[sequence]
        return total

    def note_allocated(self, sequence: Sequence) -> None:
        """The sequence has got some of its blocks."""
        self._known.pop(sequence, None)
