"""Scheduling policies: whose turn it is, and who gives way."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from loraplex.engine.sequence import Sequence, SequenceStatus
from loraplex.engine.service_ledger import ServiceLedger


class SchedulingPolicy(ABC):
    """Orders sequences. It holds no blocks and no slots, so that a new one is a new class only.

    Those that contend for a step's tokens are the running ones whose input is not computed yet, and
    the waiting ones. A running one goes on before another of its tenant begins.
    """

    def __init__(self) -> None:
        self.ledger = ServiceLedger()

    @abstractmethod
    def turns(self, contenders: Iterable[Sequence]) -> Iterator[Sequence]:
        """Whose turn it is, one after the other. A step asks once; what is charged to the one whose
        turn it was counts for the next."""

    @abstractmethod
    def end_step(self, contending: set[str]) -> None:
        """Takes in which tenants could have used more of the step's tokens than there were."""

    def set_weight(self, tenant: str, weight: float) -> None:
        """Raises ValueError where the weight is not a finite number above zero."""
        self.ledger.set_weight(tenant, weight)

    def order(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Running ones first, then by priority (lower first), then first come, first served."""
        return sorted(sequences, key=_rank)

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """Who of these is preempted when memory is short: the last in order."""
        return max(running, key=_rank)


class FCFSPolicy(SchedulingPolicy):
    """One order for all, whoever asks."""

    def turns(self, contenders: Iterable[Sequence]) -> Iterator[Sequence]:
        return iter(self.order(contenders))

    def end_step(self, contending: set[str]) -> None:
        """An order by arrival has nothing to remember."""


def _rank(sequence: Sequence) -> tuple[bool, int, int]:
    return sequence.status is SequenceStatus.WAITING, sequence.priority, sequence.arrival
