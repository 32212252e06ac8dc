"""Scheduling policies: the order in which sequences get a step's tokens."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

from loraplex.engine.scheduling.queues import TurnQueue, WaitingQueue
from loraplex.engine.scheduling.service_ledger import ServiceLedger
from loraplex.engine.sequence import Sequence


class SchedulingPolicy(ABC):
    """Orders sequences. It holds no blocks and no slots, so a new policy is only a new class."""

    def __init__(self) -> None:
        self.ledger = ServiceLedger()

    @abstractmethod
    def scope(self, tenant: str) -> str:
        """Returns one name for all tenants whose calls take turns with each other."""

    @abstractmethod
    def turns(
        self,
        unfinished: Iterable[Sequence],
        waiting: WaitingQueue,
        may_begin: Callable[[Sequence], bool],
    ) -> Iterator[Sequence]:
        """Yields sequences in the order of their turns. A step iterates once; what is charged to
        the sequence just yielded counts for the next.

        Args:
            unfinished: running ones whose input is not computed yet. They go before another of
                their tenant begins.
            may_begin: whether a waiting one can still have a turn in this step; where it cannot,
                none behind it in its queue can.
        """

    @abstractmethod
    def end_step(self, contending: set[str]) -> None:
        """Records which tenants could have used more tokens than the step had."""


class FCFSPolicy(SchedulingPolicy):
    """One order for all tenants: by priority (lower first), then first come, first served; but the
    prompts of one call let later calls pass."""

    def scope(self, tenant: str) -> str:
        """Treats all tenants as one."""
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
        """Records nothing: an order by arrival depends on no history."""
