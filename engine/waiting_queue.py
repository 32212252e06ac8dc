"""WaitingQueue: the sequences that wait, in lines by tenant and adapter."""

from bisect import insort
from collections.abc import Iterator, Mapping
from itertools import chain

from loraplex.adapters.manifest import AdapterRef
from loraplex.engine.sequence import Sequence

Line = tuple[str, AdapterRef | None]  # the tenant and the adapter of all who stand in it


class WaitingQueue:
    """Each line is in order of rank. What keeps the first of a line from its turn mostly keeps all
    behind it, so that a step need only look at the heads, however many wait."""

    def __init__(self) -> None:
        self._lines: dict[Line, list[Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

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

    def add(self, sequence: Sequence) -> None:
        line = self._lines.setdefault(line_of(sequence), [])
        insort(line, sequence, key=lambda other: other.rank)

    def remove(self, sequence: Sequence) -> None:
        """Raises ValueError where it does not wait."""
        line = self._lines.get(line_of(sequence), [])
        line.remove(sequence)
        if not line:
            del self._lines[line_of(sequence)]


def line_of(sequence: Sequence) -> Line:
    return sequence.tenant, sequence.adapter
