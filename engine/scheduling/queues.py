"""SequenceRegistry: the sequences that have not ended. WaitingQueue: the waiting sequences.
TurnQueue: the contenders for a step, in order."""

from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from itertools import chain

from loraplex.adapters.manifest import AdapterRef
from loraplex.engine.protocol import BasePromptRef
from loraplex.engine.scheduling.call_turns import CallTurns, Scope
from loraplex.engine.sequence import Sequence

QueueKey = tuple[str, AdapterRef | None]  # the tenant and the adapter of all its sequences


class SequenceRegistry:
    """Sequences that wait or run, by request, and how many of them use each base prompt. No
    question visits a sequence of another request."""

    def __init__(self) -> None:
        self._by_request: dict[str, list[Sequence]] = defaultdict(list)
        self._num_users: Counter[BasePromptRef] = Counter()

    def add(self, sequence: Sequence) -> None:
        self._by_request[sequence.request_id].append(sequence)
        if sequence.base_prompt is not None:
            self._num_users[sequence.base_prompt] += 1

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that has ended."""
        siblings = self._by_request[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._by_request[sequence.request_id]
        if sequence.base_prompt is not None:
            self._num_users[sequence.base_prompt] -= 1
            if not self._num_users[sequence.base_prompt]:
                del self._num_users[sequence.base_prompt]

    def of_request(self, request_id: str) -> list[Sequence]:
        """Returns a request's sequences."""
        return list(self._by_request.get(request_id, ()))

    def num_users(self, base_prompt: BasePromptRef) -> int:
        """Returns the number of sequences that begin with a base prompt."""
        return self._num_users[base_prompt]


class WaitingQueue:
    """Waiting sequences in one ordered queue per tenant and adapter.

    What blocks the head of a queue usually blocks all sequences behind it, so a step looks only at
    the heads, however many wait. Adding and removing cost O(log n).
    """

    def __init__(self, scope: Scope = lambda tenant: tenant) -> None:
        """`scope`: maps tenants that share one order of turns to the same name."""
        self._queues: dict[QueueKey, list[Sequence]] = {}
        self._turns = CallTurns(scope)
        self._num_waiting: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._num_waiting.total()

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._queues.values())

    @property
    def queues(self) -> Mapping[QueueKey, list[Sequence]]:
        """Returns a live, read-only view of the queues; none is empty."""
        return self._queues

    @property
    def tenants(self) -> set[str]:
        return {tenant for tenant, _ in self._queues}

    @property
    def adapters(self) -> set[AdapterRef]:
        return {adapter for _, adapter in self._queues if adapter is not None}

    def num_of(self, tenant: str) -> int:
        """Returns the number of waiting sequences of a tenant."""
        return self._num_waiting[tenant]

    def enter(self, sequence: Sequence) -> None:
        """Adds a sequence that has just arrived."""
        sequence.turn = self._turns.turn_for(sequence)
        self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence that has a turn already."""
        queue = self._queues.setdefault(queue_key(sequence), [])
        insort(queue, sequence, key=_order)
        self._num_waiting[sequence.tenant] += 1
        self._turns.note_waits(sequence)

    def begin(self, sequence: Sequence) -> None:
        """Removes a sequence that is admitted; later arrivals are ordered behind it."""
        self.remove(sequence)
        self._turns.note_begins(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence. Raises ValueError where it is not waiting."""
        queue = self._queues.get(queue_key(sequence), [])
        # The choices of one request have the same order.
        first = bisect_left(queue, sequence.order, key=_order)
        del queue[queue.index(sequence, first)]
        if not queue:
            del self._queues[queue_key(sequence)]
        self._num_waiting[sequence.tenant] -= 1
        if not self._num_waiting[sequence.tenant]:
            del self._num_waiting[sequence.tenant]
        self._turns.note_gone(sequence)


def queue_key(sequence: Sequence) -> QueueKey:
    return sequence.tenant, sequence.adapter


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order


class TurnQueue:
    """Yields running sequences first, then waiting ones, in order; a turn costs O(log queues)."""

    def __init__(
        self,
        running: Iterable[Sequence],
        queues: Iterable[list[Sequence]],
        may_begin: Callable[[Sequence], bool],
    ) -> None:
        """
        Args:
            running: that have more input to compute.
            queues: of waiting sequences, none empty; an admitted sequence leaves its queue.
            may_begin: asked of the head of a queue. Where it may not, the whole queue has gone.
        """
        self._running = deque(sorted(running, key=lambda sequence: sequence.order))
        self._heads = [
            (queue[0].order, 0, queue) for queue in queues
        ]  # with its place in the queue
        heapify(self._heads)
        self._may_begin = may_begin

    def head(self) -> Sequence | None:
        """Returns the sequence whose turn it is; None where none is left."""
        if self._running:
            return self._running[0]
        while self._heads:
            _, place, queue = self._heads[0]
            if self._may_begin(queue[place]):
                return queue[place]
            heappop(self._heads)
        return None

    def advance(self, sequence: Sequence) -> None:
        """Ends the head's turn, whatever its outcome."""
        if self._running:
            self._running.popleft()
            return
        _, place, queue = self._heads[0]
        if place < len(queue) and queue[place] is sequence:
            place += 1  # it still waits, and lets those behind it pass
        if place < len(queue):
            heapreplace(self._heads, (queue[place].order, place, queue))
        else:
            heappop(self._heads)
