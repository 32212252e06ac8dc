"""FairPolicy: orders tenants by the service that they have received."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush

from loraplex.engine.scheduling.policy import SchedulingPolicy
from loraplex.engine.scheduling.queues import TurnQueue, WaitingQueue
from loraplex.engine.sequence import Sequence


class FairPolicy(SchedulingPolicy):
    """Weighted virtual token counters (VTC; Sheng et al., OSDI 2024, arXiv 2401.00588).

    The contending tenant with the lowest counter has the next turn. Within a tenant, and so for a
    single tenant, the order is that of FCFS. A tenant that contends again after a pause is lifted
    to the lowest counter of the tenants that kept contending, so turns cannot be saved up. The unit
    is the tenant: more keys or adapters do not give a larger share.

    Args:
        exempt: a tenant that is always first and is not charged, if any.
    """

    def __init__(self, exempt: str | None = None) -> None:
        super().__init__()
        self._exempt = exempt
        self._contending: set[str] = set()
        self._last: str | None = None  # whose turn it was last

    def scope(self, tenant: str) -> str:
        """Returns the tenant itself: between tenants the counters decide."""
        return tenant

    def turns(
        self,
        unfinished: Iterable[Sequence],
        waiting: WaitingQueue,
        may_begin: Callable[[Sequence], bool],
    ) -> Iterator[Sequence]:
        running: dict[str, list[Sequence]] = defaultdict(list)
        for sequence in unfinished:
            running[sequence.tenant].append(sequence)
        queues: dict[str, list[list[Sequence]]] = defaultdict(list)
        for (tenant, _), queue in waiting.queues.items():
            queues[tenant].append(queue)
        tenants = running.keys() | queues.keys()
        self._lift(tenants - {self._exempt})
        return self._by_counter([TurnQueue(running[t], queues[t], may_begin) for t in tenants])

    def end_step(self, contending: set[str]) -> None:
        self._contending = contending - {self._exempt}

    def _by_counter(self, queues: list[TurnQueue]) -> Iterator[Sequence]:
        heap = [self._entry(head, queue) for queue in queues if (head := queue.head())]
        heapify(heap)
        while heap:
            *_, queue = heappop(heap)
            sequence = queue.head()
            if sequence is None:  # no other sequence of this tenant can be admitted
                continue
            if sequence.tenant != self._exempt:
                self._last = sequence.tenant
            yield sequence
            queue.advance(sequence)
            if (head := queue.head()) is not None:
                heappush(heap, self._entry(head, queue))

    def _entry(self, head: Sequence, queue: TurnQueue) -> tuple[float, bool, int, TurnQueue]:
        """Orders by counter; among equals, tenants that have just arrived come first, then earlier
        sequences."""
        is_known = head.tenant in self._contending
        return self._counter(head.tenant), is_known, head.arrival, queue

    def _counter(self, tenant: str) -> float:
        return -1.0 if tenant == self._exempt else self.ledger.of(tenant).counter

    def _lift(self, tenants: set[str]) -> None:
        stayed = tenants & self._contending
        if not stayed and self._last is not None:
            stayed = {self._last}
        level = min(map(self._counter, stayed), default=0.0)
        for tenant in tenants - self._contending:
            self.ledger.lift(tenant, level)
