"""FairPolicy: tenants take turns by what they have been served."""

from collections import deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from loraplex.engine.policy import SchedulingPolicy
from loraplex.engine.sequence import Sequence


class FairPolicy(SchedulingPolicy):
    """Weighted virtual token counters (VTC; Sheng et al., OSDI 2024, arXiv 2401.00588).

    The next turn is the contending tenant's with the lowest counter. Inside a tenant, and so among
    all where there is only one, the order is that of FCFS. A tenant that contends again after it
    did not is lifted to the lowest counter of those who did, so nobody saves up turns. The unit is
    the tenant: keys and adapters are no way to a larger share.

    Args:
        exempt: a tenant who is always first and whose service counts for nothing, if any.
    """

    def __init__(self, exempt: str | None = None) -> None:
        super().__init__()
        self._exempt = exempt
        self._contending: set[str] = set()
        self._last: str | None = None  # whose turn it was last

    def turns(self, contenders: Iterable[Sequence]) -> Iterator[Sequence]:
        queues: dict[str, deque[Sequence]] = {}
        for sequence in self.order(contenders):
            queues.setdefault(sequence.tenant, deque()).append(sequence)
        self._lift(queues.keys() - {self._exempt})
        return self._by_counter(queues)

    def end_step(self, contending: set[str]) -> None:
        self._contending = contending - {self._exempt}

    def _by_counter(self, queues: dict[str, deque[Sequence]]) -> Iterator[Sequence]:
        heap = [self._entry(queue) for queue in queues.values()]
        heapify(heap)
        while heap:
            *_, queue = heappop(heap)
            sequence = queue.popleft()
            if sequence.tenant != self._exempt:
                self._last = sequence.tenant
            yield sequence
            if queue:
                heappush(heap, self._entry(queue))

    def _entry(self, queue: deque[Sequence]) -> tuple[float, bool, int, deque[Sequence]]:
        """By counter; among equals who has just come goes first, then whose sequence came first."""
        tenant = queue[0].tenant
        return self._counter(tenant), tenant in self._contending, queue[0].arrival, queue

    def _counter(self, tenant: str) -> float:
        return -1.0 if tenant == self._exempt else self.ledger.of(tenant).counter

    def _lift(self, tenants: set[str]) -> None:
        stayed = tenants & self._contending
        if not stayed and self._last is not None:
            stayed = {self._last}
        level = min(map(self._counter, stayed), default=0.0)
        for tenant in tenants - self._contending:
            self.ledger.lift(tenant, level)
