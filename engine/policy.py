"""Scheduling policies: whose turn it is, and who gives way."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from loraplex.engine.sequence import Sequence


class SchedulingPolicy(ABC):
    """Orders sequences. It holds no blocks and no slots, so that a new one is a new class only."""

    @abstractmethod
    def order(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """The order in which sequences are served, first one first."""

    def victim(self, running: list[Sequence]) -> Sequence:
        """Who is preempted when memory is short: by default the last to be served."""
        return self.order(running)[-1]


class FCFSPolicy(SchedulingPolicy):
    """By priority (lower first), then first come, first served."""

    def order(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        return sorted(sequences, key=lambda sequence: (sequence.priority, sequence.arrival))
