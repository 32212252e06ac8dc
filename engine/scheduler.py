"""Scheduler: what runs in this step, and what its result means for each sequence."""

from dataclasses import dataclass, field

from loraplex.adapters.manifest import AdapterRef
from loraplex.engine.adapter_gate import AdapterGate
from loraplex.engine.kv_cache_manager import BlockCopy, CachedPrefix, KVCacheManager
from loraplex.engine.kv_groups import blocks_at_peak
from loraplex.engine.policy import SchedulingPolicy
from loraplex.engine.protocol import FinishReason, PositionLogprobs
from loraplex.engine.sequence import Sequence, SequenceStatus
from loraplex.engine.step_budget import StepBudget
from loraplex.engine.stopping import StopChecker


@dataclass(frozen=True)
class ScheduledSequence:
    sequence: Sequence
    num_tokens: int  # to compute in this step
    num_samples: int  # next tokens to sample: 0 while its end is not reached; n on a fork


@dataclass(frozen=True)
class SchedulerOutput:
    scheduled: list[ScheduledSequence]
    copies: list[BlockCopy]  # to be made before anything is written
    num_preempted: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)


@dataclass(frozen=True)
class SampledToken:
    token_id: int
    logprobs: PositionLogprobs | None = None


@dataclass(frozen=True)
class ModelRunnerOutput:
    samples: dict[int, list[SampledToken]] = field(default_factory=dict)  # by sequence id
    prompt_logprobs: dict[int, dict[int, PositionLogprobs]] = field(default_factory=dict)
    # by sequence id, then by position in the prompt


@dataclass(frozen=True)
class SequenceUpdate:
    """One new token of one sequence."""

    sequence: Sequence
    token_id: int
    position: int  # among the output tokens; 0 is the first
    text: str
    logprobs: PositionLogprobs | None
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logits_rows: int  # prompt positions of one step whose logits are wanted


class Scheduler:
    """Continuous batching without phases.

    Each sequence has computed tokens and tokens in all. A step hands out tokens, running sequences
    first, so that the first catches up with the second; what is left of the budget admits waiting
    ones. Chunked prefill, prefix hits, forks and the return from preemption all follow from that.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        gate: AdapterGate,
        policy: SchedulingPolicy,
        limits: SchedulerLimits,
        stops: StopChecker,
    ) -> None:
        self.kv = kv
        self.gate = gate
        self.policy = policy
        self.limits = limits
        self.stops = stops
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def adapters_in_use(self) -> set[AdapterRef]:
        return {s.adapter for s in [*self.running, *self.waiting] if s.adapter is not None}

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> SchedulerOutput:
        budget = StepBudget(self.limits.max_num_batched_tokens, self.limits.max_logits_rows)
        scheduled, num_preempted = self._schedule_running(budget)
        if not num_preempted and self.waiting:
            scheduled += self._schedule_waiting(budget, scheduled)
        return SchedulerOutput(scheduled, self.kv.take_copies(), num_preempted)

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[SequenceUpdate]:
        """Takes a step's result in: appends tokens, forks, checks stops, frees the finished."""
        updates: list[SequenceUpdate] = []
        for item in output.scheduled:
            sequence = item.sequence
            sequence.num_computed_tokens += item.num_tokens
            self.kv.remember_computed(sequence)
            self._store_prompt_logprobs(sequence, result)
            samples = result.samples.get(sequence.seq_id, [])
            choices = [sequence, *self._fork(sequence, len(samples))]
            for choice, sample in zip(choices, samples, strict=False):
                updates.append(self._append(choice, sample))
        return updates

    def abort(self, request_id: str) -> None:
        """Ends all sequences of a request at once; nothing of them stays behind."""
        for sequence in [*self.running, *self.waiting]:
            if sequence.request_id == request_id:
                self._end(sequence)
                sequence.status = SequenceStatus.FINISHED

    def _schedule_running(self, budget: StepBudget) -> tuple[list[ScheduledSequence], int]:
        scheduled: list[ScheduledSequence] = []
        queue = self.policy.order(self.running)
        num_preempted = 0
        while queue:
            sequence = queue.pop(0)
            num_tokens = budget.offer(sequence, reserved=len(queue))  # a token for each to follow
            while not self.kv.allocate_slots(sequence, num_tokens):
                victim = self.policy.victim([sequence, *queue])
                self._preempt(victim)
                num_preempted += 1
                if victim is sequence:
                    break
                queue.remove(victim)
            else:
                budget.spend(sequence, num_tokens)
                scheduled.append(self._scheduled(sequence, num_tokens))
        return scheduled, num_preempted

    def _schedule_waiting(
        self, budget: StepBudget, running: list[ScheduledSequence]
    ) -> list[ScheduledSequence]:
        scheduled: list[ScheduledSequence] = []
        coming = {key for item in running for key in self._completed_keys(item)}
        rows = self.limits.max_num_seqs - sum(self._rows(s) for s in self.running)
        for sequence in self.policy.order(self.waiting):
            if budget.num_tokens <= 0 or rows < self._rows(sequence):
                break
            if not self.gate.open(sequence, self.running):
                continue  # nobody waits for another's adapter
            cached = self.kv.find_cached(sequence)
            if self.kv.next_key(sequence, cached) in coming:
                self.gate.close(sequence)
                continue  # what it needs next is being computed: it is there in the next step
            if not self._admit(sequence, cached):
                self.gate.close(sequence)
                break  # a later, smaller one must not overtake for ever
            num_tokens = budget.offer(sequence)
            if not self.kv.allocate_slots(sequence, num_tokens):
                raise RuntimeError("admission promised blocks that are not there")
            budget.spend(sequence, num_tokens)
            rows -= self._rows(sequence)
            scheduled.append(self._scheduled(sequence, num_tokens))
            coming.update(self._completed_keys(scheduled[-1]))
        self.gate.forget_absent(self.waiting)
        return scheduled

    def _completed_keys(self, item: ScheduledSequence) -> list[bytes]:
        return self.kv.completed_keys(item.sequence, item.num_tokens)

    def _admit(self, sequence: Sequence, cached: CachedPrefix) -> bool:
        """Admits a sequence if its full input fits beside what running ones were promised."""
        needed = self._peak(sequence) - cached.num_blocks + self.kv.num_unheld_blocks(cached)
        promised = sum(
            max(0, self._peak(other) - self.kv.num_held_blocks(other))
            for other in self.running
            if other.num_uncomputed_tokens > 1
        )
        if needed + promised > self.kv.pool.num_free:
            return False
        self.kv.admit(sequence, cached)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = cached.num_tokens
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.status = SequenceStatus.RUNNING
        return True

    def _peak(self, sequence: Sequence) -> int:
        chunk = self.limits.max_num_batched_tokens
        return blocks_at_peak(self.kv.groups, self.kv.block_size, sequence.num_tokens, chunk)

    def _scheduled(self, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
        reaches_end = num_tokens == sequence.num_uncomputed_tokens
        return ScheduledSequence(sequence, num_tokens, self._rows(sequence) if reaches_end else 0)

    def _rows(self, sequence: Sequence) -> int:
        """Sequences that this one stands for: n until it has forked into its choices."""
        return sequence.sampling.n if sequence.num_output_tokens == 0 else 1

    def _fork(self, parent: Sequence, num_choices: int) -> list[Sequence]:
        children = [parent.fork(index) for index in range(1, num_choices)]
        for child in children:
            self.kv.fork(parent, child)
            self.gate.share(parent, child)
            self.running.append(child)
        return children

    def _append(self, sequence: Sequence, sample: SampledToken) -> SequenceUpdate:
        sequence.token_ids.append(sample.token_id)
        text = self.stops.check(sequence)
        if sequence.finish_reason is not None:
            self._end(sequence)
            sequence.status = SequenceStatus.FINISHED
        return SequenceUpdate(
            sequence=sequence,
            token_id=sample.token_id,
            position=sequence.num_output_tokens - 1,
            text=text,
            logprobs=sample.logprobs,
            finish_reason=sequence.finish_reason,
        )

    def _preempt(self, sequence: Sequence) -> None:
        """Takes back all that a sequence holds; it computes its tokens again, output included."""
        self.kv.free(sequence)
        self.gate.close(sequence)
        self.running.remove(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.WAITING
        self.waiting.append(sequence)
        self.num_preemptions += 1

    def _end(self, sequence: Sequence) -> None:
        """The one way out: finished and aborted sequences give back the same things."""
        self.kv.free(sequence)
        self.gate.close(sequence)
        (self.running if sequence in self.running else self.waiting).remove(sequence)

    def _store_prompt_logprobs(self, sequence: Sequence, result: ModelRunnerOutput) -> None:
        if sequence.prompt_logprobs is not None:
            for position, logprobs in result.prompt_logprobs.get(sequence.seq_id, {}).items():
                sequence.prompt_logprobs[position] = logprobs
