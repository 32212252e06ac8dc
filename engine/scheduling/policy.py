"""Scheduling policies: whose turn it is."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

from loraplex.engine.scheduling.queues import TurnQueue, WaitingQueue
from loraplex.engine.scheduling.service_ledger import ServiceLedger
from loraplex.engine.sequence import Sequence


class SchedulingPolicy(ABC):
    """Orders sequences. It holds no blocks and no slots, so that a new one is a new class only."""

    def __init__(self) -> None:
        self.ledger = ServiceLedger()

    @abstractmethod
    def scope(self, tenant: str) -> str:
        """Names the tenants alike whose calls take turns with each other."""

    @abstractmethod
    def turns(
        self,
        unfinished: Iterable[Sequence],
        waiting: WaitingQueue,
        may_begin: Callable[[Sequence], bool],
    ) -> Iterator[Sequence]:
        """Whose turn it is, one after the other. A step asks once; what is charged to the one whose
        turn it was counts for the next.

        Args:
            unfinished: running ones whose input is not computed yet. They go on before another of
                their tenant begins.
            may_begin: whether a waiting one can still have a turn in this step; where it cannot,
                none behind it in its queue can.
        """

    @abstractmethod
    def end_step(self, contending: set[str]) -> None:
        """Takes in which tenants could have used more of the step's tokens than there were."""


class FCFSPolicy(SchedulingPolicy):
    """One order for all, whoever asks: by priority (lower first), then first come, first served;
    but the prompts of one call let calls that come later pass."""

    def scope(self, tenant: str) -> str:
        """All tenants are one."""
        return ""

    def turns(
        self,
        unfinished: Iterable[Sequence],
        waiting: WaitingQueue,
        may_begin: Callable[[Sequence], bool],
    ) -> Iterator[Sequence]:
        queue = TurnQueue(unfinished, waiting.queues.values(), may_begin)
        while (sequence := queue.head()) is not None:
            yield sequence
            queue.advance(sequence)

    def end_step(self, contending: set[str]) -> None:
        """An order by arrival has nothing to remember."""
