"""Admission: decides whether a waiting sequence's blocks fit beside those promised to others."""

from collections import Counter
from collections.abc import Mapping
from enum import Enum, auto

from loraplex.engine.kv.admission_plan import AdmissionPlan
from loraplex.engine.kv.budgets import Budgets
from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.scheduling.queues import QueueKey, WaitingQueue, queue_key
from loraplex.engine.sequence import Sequence


class Verdict(Enum):
    """The outcome of trying to admit a waiting sequence."""

    ADMITTED = auto()
    NO_ADAPTER = auto()  # it is on its way, or there is no slot for it
    NOT_READY = auto()  # the beginning of its input is on its way
    OVER_CEILING = auto()  # its tenant holds all the blocks that it may
    NO_ROOM = auto()  # for any sequence, except within a floor
    NO_ROWS = auto()  # for any sequence


class StepAdmission:
    """Tracks which sequences may still be admitted in one step, given the verdicts so far.

    A sequence without room is not overtaken by later, smaller ones, or it would starve; but floors
    are not kept free for it, so other tenants may still use theirs. A tenant at its ceiling blocks
    only its own sequences, and a missing adapter only those that wait for it. A sequence that waits
    for cached blocks is passed over by others, up to a number of lookups that cost less than the
    step.
    """

    def __init__(
        self, budgets: Budgets, waiting: WaitingQueue, max_num_seqs: int, *, within_floor: bool
    ) -> None:
        self.within_floor = within_floor
        self.impossible: list[Sequence] = []  # that no other sequence's end would let run
        self._waiting = waiting
        self._max_passed_over = max_num_seqs  # sequences of a queue that may be passed by
        self._has_rows = True
        self._below_floor = {name for name in waiting.tenants if budgets.over_floor(name) < 0}
        self._at_ceiling: set[str] = set()
        self._without_adapter: set[QueueKey] = set()
        self._num_not_ready: Counter[QueueKey] = Counter()

    def admits(self, sequence: Sequence) -> bool:
        """Returns whether the sequence, and so perhaps the next in its queue, can still be admitted
        in this step."""
        queue = queue_key(sequence)
        return (
            self._has_rows
            and (not self.within_floor or sequence.tenant in self._below_floor)
            and sequence.tenant not in self._at_ceiling
            and queue not in self._without_adapter
            and self._num_not_ready[queue] < self._max_passed_over
        )

    def contending(self) -> set[str]:
        """Returns the tenants whose sequences wait for memory or tokens and for nothing else."""
        able = {
            queue[0]
            for queue, sequences in self._waiting.queues.items()
            if queue not in self._without_adapter and self._num_not_ready[queue] < len(sequences)
        }
        return able - self._at_ceiling

    def note(self, sequence: Sequence, verdict: Verdict) -> None:
        if verdict is Verdict.NO_ADAPTER:
            self._without_adapter.add(queue_key(sequence))
        elif verdict is Verdict.NOT_READY:
            self._num_not_ready[queue_key(sequence)] += 1
        elif verdict is Verdict.OVER_CEILING:
            self._at_ceiling.add(sequence.tenant)
        elif verdict is Verdict.NO_ROOM:
            self.within_floor = True
            self._below_floor.discard(sequence.tenant)
        elif verdict is Verdict.NO_ROWS:
            self._has_rows = False


class Admission:
    """Weighs a sequence's full input against the pool and its tenant's floor and ceiling."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._budgets = kv.pool.budgets

    def judge(
        self, plan: AdmissionPlan, promised: Mapping[str, int], *, within_floor: bool
    ) -> Verdict:
        """Returns whether a sequence can start now; if so, the pool has its blocks until it is at
        its peak.

        Args:
            promised: blocks that running sequences have not got yet, by account.
            within_floor: it may only take what its tenant's floor guarantees.
        """
        tenant = plan.sequence.tenant
        demand = Counter(plan.demand)
        demand.update(promised)
        if not self._budgets.keeps_ceiling(tenant, demand[tenant]):
            return Verdict.OVER_CEILING
        if within_floor and self._budgets.over_floor(tenant) + demand[tenant] > 0:
            return Verdict.NO_ROOM
        return Verdict.ADMITTED if self._budgets.keeps_floors(demand) else Verdict.NO_ROOM

    def refusal(self, sequence: Sequence) -> str | None:
        """Returns why the sequence can never run, whichever others end first; None where it can."""
        needed = self._own_blocks(sequence, sequence.num_tokens + 1)
        limit = self._budgets.limit(sequence.tenant)
        if needed <= limit:
            return None
        return (
            f"The input of {sequence.num_tokens} tokens, and one to be generated, takes {needed} "
            f"blocks of {self._kv.block_size} tokens; this tenant can have {limit}."
        )

    def longest(self, sequence: Sequence) -> int:
        """Returns the most tokens, up to its `max_len`, for which the sequence's tenant can have
        blocks."""
        limit = self._budgets.limit(sequence.tenant)
        low, high = sequence.num_tokens, sequence.max_len
        if self._own_blocks(sequence, high) <= limit:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            if self._own_blocks(sequence, middle) <= limit:
                low = middle
            else:
                high = middle
        return low

    def _own_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Returns the blocks that its tenant pays for at that length: all but the public ones."""
        layout, size = self._kv.layout, self._kv.block_size
        public = self._kv.num_public_blocks(sequence)
        return sum(
            group.state.peak(num_tokens - given * size, layout.chunk, size)
            for group, given in zip(layout.groups, public, strict=True)
        )
