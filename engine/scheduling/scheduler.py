"""Scheduler: chooses what runs in a step, and applies the step's result to each sequence."""

import logging
from dataclasses import dataclass, field, replace
from typing import Protocol

from loraplex.adapters.manifest import AdapterRef
from loraplex.engine.errors import INTERNAL_ERROR
from loraplex.engine.kv.admission_plan import AdmissionPlan
from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.protocol import FinishReason
from loraplex.engine.scheduling.adapter_slots import AdapterSlots
from loraplex.engine.scheduling.admission import Admission, StepAdmission, Verdict
from loraplex.engine.scheduling.policy import SchedulingPolicy
from loraplex.engine.scheduling.preemption import choose_borrower, choose_victim
from loraplex.engine.scheduling.promises import Promises
from loraplex.engine.scheduling.queues import SequenceRegistry, WaitingQueue
from loraplex.engine.scheduling.step_input import ScheduledSequence, flatten, logits_rows
from loraplex.engine.scheduling.step_plan import StepPlan
from loraplex.engine.scheduling.stop_checker import StopChecker, TextFailed
from loraplex.engine.sequence import Output, Sequence, SequenceStatus
from loraplex.engine.step import Logprobs, SampledToken, StepInput, StepOutput

logger = logging.getLogger(__name__)


class Drafter(Protocol):
    """Guesses the next tokens of sequences, so that one step can verify several tokens."""

    def propose(self, sequence: Sequence) -> tuple[int, ...]:
        """Returns token ids that may follow the sequence's last one; wrong ones only cost time."""


@dataclass(frozen=True)
class SchedulerOutput:
    scheduled: list[ScheduledSequence]
    step: StepInput
    num_preempted: int = 0
    impossible: list[Sequence] = field(default_factory=list)  # waiting, and can never begin

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)


@dataclass(frozen=True)
class SequenceUpdate:
    """One new token of one sequence."""

    sequence: Sequence
    token_id: int
    position: int  # among the output tokens; 0 is the first
    text: str
    logprobs: Logprobs | None
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logits_rows: int  # prompt positions of one step whose logits are wanted
    max_drafts: int = 64  # of one step


class Scheduler:
    """Continuous batching without phases.

    Each sequence has a number of computed tokens and a number of tokens in all. A step hands out
    tokens so that the first number catches up with the second: one to each running sequence, and
    the rest by turns to sequences with more input to compute and to waiting ones. Chunked prefill,
    prefix hits, forks and the return from preemption all follow from that.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        adapter_slots: AdapterSlots,
        policy: SchedulingPolicy,
        limits: SchedulerLimits,
        stops: StopChecker,
        drafter: Drafter | None = None,
    ) -> None:
        """`drafter`: proposes drafts; None: a step yields one token per sequence."""
        self.kv = kv
        self.adapter_slots = adapter_slots
        self.policy = policy
        self.limits = limits
        self.stops = stops
        self.drafter = drafter
        self.admission = Admission(kv)
        self.waiting = WaitingQueue(policy.scope)
        self.running: list[Sequence] = []
        self.registry = SequenceRegistry()
        self.num_preemptions = 0

    @property
    def adapters_in_use(self) -> set[AdapterRef]:
        return self.waiting.adapters | {s.adapter for s in self.running if s.adapter is not None}

    def num_open(self, tenant: str) -> int:
        """Returns the number of a tenant's sequences that wait or run."""
        return self.waiting.num_of(tenant) + sum(s.tenant == tenant for s in self.running)

    def add(self, sequence: Sequence) -> None:
        sequence.added_at = self.kv.pool.metering.now()
        self.registry.add(sequence)
        self.waiting.enter(sequence)

    def schedule(self) -> SchedulerOutput:
        self.kv.tiers.begin_step()
        limits = self.limits
        num_preempted = self._claw_back()
        rows = limits.max_num_seqs - sum(s.num_rows for s in self.running)
        plan = StepPlan(
            limits.max_num_batched_tokens, limits.max_logits_rows, rows, limits.max_drafts
        )
        num_preempted += self._keep_running(plan)
        budgets = self.kv.pool.budgets
        is_short = num_preempted > 0
        verdicts = StepAdmission(budgets, self.waiting, limits.max_num_seqs, within_floor=is_short)
        self._hand_out(plan, verdicts)
        scheduled = [
            self._with_drafts(plan, self._scheduled(*granted)) for granted in plan.granted.items()
        ]
        return SchedulerOutput(
            scheduled, self._input(scheduled), num_preempted, verdicts.impossible
        )

    def update(self, output: SchedulerOutput, result: StepOutput) -> list[SequenceUpdate]:
        """Applies a step's result: appends tokens, forks, checks stops, releases finished
        sequences.

        Sequences that failed in the step are left as they were, and one whose text fails now is
        added to them; `abort` ends them.
        """
        updates: list[SequenceUpdate] = []
        for item in output.scheduled:
            sequence = item.sequence
            if sequence.seq_id in result.failed:
                continue
            sequence.num_computed_tokens += item.num_tokens
            self.kv.index_computed(sequence)
            self._store_prompt_logprobs(sequence, result)
            if sequence.output is Output.KEEP and sequence.num_uncomputed_tokens == 0:
                self._keep(sequence)
            samples = result.samples.get(sequence.seq_id, [])
            choices = [sequence, *self._fork(sequence, len(samples))]
            try:
                for choice, tokens in zip(choices, samples, strict=False):
                    updates += self._append(choice, tokens)
            except TextFailed:
                logger.exception("The text of sequence %d failed", sequence.seq_id)
                result.failed[sequence.seq_id] = INTERNAL_ERROR
        return updates

    def abort(self, request_id: str) -> None:
        """Ends all sequences of a request at once and releases everything they hold. The cost does
        not depend on the number of other waiting sequences."""
        for sequence in self.registry.of_request(request_id):
            self._end(sequence)
            sequence.status = SequenceStatus.FINISHED

    def _claw_back(self) -> int:
        """Preempts until floors that were raised above what others left are whole again, once a
        tenant with such a floor has work; returns the number of preempted sequences."""
        budgets = self.kv.pool.budgets
        num_preempted = 0
        while budgets.is_overdrawn and any(
            budgets.over_floor(tenant) < 0
            for tenant in self.waiting.tenants | {s.tenant for s in self.running}
        ):
            victim = choose_borrower(self.running, budgets)
            if victim is None:
                break
            self._preempt(victim)
            num_preempted += 1
        return num_preempted

    def _keep_running(self, plan: StepPlan) -> int:
        """Gives each running sequence one token; returns how many sequences were preempted for
        that.

        Sequences preempted before come first, so that they keep the room for which they were
        admitted again.
        """
        queue = sorted(self.running, key=lambda s: (-s.num_preemptions, s.order))
        budgets = self.kv.pool.budgets
        num_preempted = 0
        while queue:
            sequence = queue.pop(0)
            while not self.kv.allocate_slots(sequence, 1):
                victim = choose_victim(sequence, queue, budgets)
                self._preempt(victim)
                num_preempted += 1
                if victim is sequence:
                    break
                queue.remove(victim)
            else:
                self._grant(plan, sequence, 1, self.kv.completed_keys(sequence, 1))
        return num_preempted

    def _hand_out(self, plan: StepPlan, verdicts: StepAdmission) -> None:
        """Hands out the step's remaining tokens by turns, to unfinished inputs and to waiting
        sequences."""
        turns = self.policy.turns(plan.unfinished, self.waiting, verdicts.admits)
        promises = Promises(self.running, self.kv.promised)
        while plan.num_tokens > 0 and (sequence := next(turns, None)) is not None:
            if sequence.status is SequenceStatus.RUNNING:
                self._extend(plan, sequence)
                promises.note_allocated(sequence)
                continue
            verdict = self._begin(plan, sequence, promises, within_floor=verdicts.within_floor)
            if self._can_never_run(sequence, verdict, verdicts):
                verdicts.impossible.append(sequence)
            verdicts.note(sequence, verdict)
        self.policy.end_step(verdicts.contending() | {s.tenant for s in plan.unfinished})
        self.adapter_slots.forget_absent(self.waiting.adapters)

    def _extend(self, plan: StepPlan, sequence: Sequence) -> None:
        """Computes more of a running sequence's input where its blocks can be allocated."""
        num_tokens = plan.offer(sequence)
        if num_tokens > plan.granted[sequence] and self.kv.allocate_slots(sequence, num_tokens):
            keys = self.kv.completed_keys(sequence, num_tokens)
            self._grant(plan, sequence, num_tokens, keys)

    def _begin(
        self, plan: StepPlan, sequence: Sequence, promises: Promises, *, within_floor: bool
    ) -> Verdict:
        """Admits a waiting sequence if rows, its adapter and its blocks are available."""
        if plan.num_rows < sequence.num_rows:
            return Verdict.NO_ROWS
        if self.kv.tiers.is_awaiting(sequence.seq_id):
            return Verdict.NOT_READY
        num_bytes = self.adapter_slots.bytes_to_load(sequence)
        if not self.adapter_slots.open(sequence, self.running):
            return Verdict.NO_ADAPTER
        self.policy.ledger.charge(sequence.tenant, loaded=num_bytes)
        entry = self.kv.plan(sequence)
        if entry.is_awaited or entry.next_key in plan.coming:
            verdict = Verdict.NOT_READY  # what it needs next is there in the next step
        else:
            promised = promises.by_account()
            verdict = self.admission.judge(entry, promised, within_floor=within_floor)
        if verdict is Verdict.ADMITTED:
            self._admit(plan, entry)
        else:
            self.adapter_slots.close(sequence)
        return verdict

    def _admit(self, plan: StepPlan, entry: AdmissionPlan) -> None:
        """Moves a sequence that was judged to have room to the running ones."""
        sequence = entry.sequence
        num_tokens = min(plan.offer(sequence), entry.num_uncomputed_tokens)
        keys = self.kv.commit(entry, num_tokens)
        plan.num_rows -= sequence.num_rows
        self._grant(plan, sequence, num_tokens, keys)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = entry.cached.num_tokens
            metering = self.kv.pool.metering
            sequence.queue_seconds = metering.now() - sequence.added_at
            metering.note_wait(sequence.tenant, sequence.queue_seconds)
        self.waiting.begin(sequence)
        self.running.append(sequence)
        sequence.status = SequenceStatus.RUNNING

    def _grant(
        self, plan: StepPlan, sequence: Sequence, num_tokens: int, full: list[bytes]
    ) -> None:
        """Grants a sequence so many tokens in all and charges the difference; `full`: keys of the
        blocks that they fill."""
        more = plan.grant(sequence, num_tokens)
        plan.coming.update(full)
        num_choices = self._scheduled(sequence, num_tokens).num_choices
        is_output = num_choices > 0 and sequence.num_output_tokens > 0
        self.policy.ledger.charge(sequence.tenant, prefill=more - is_output, decode=num_choices)

    def _can_never_run(self, sequence: Sequence, verdict: Verdict, verdicts: StepAdmission) -> bool:
        """Returns whether a sequence was refused although no running sequence's end would make
        room."""
        if verdict is Verdict.NO_ROOM:
            return not self.running and not verdicts.within_floor
        if verdict is not Verdict.OVER_CEILING or not self.running:
            return verdict is Verdict.OVER_CEILING
        is_alone = all(other.tenant != sequence.tenant for other in self.running)
        return is_alone and self.admission.refusal(sequence) is not None

    def _scheduled(self, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
        reaches_end = num_tokens == sequence.num_uncomputed_tokens
        is_sampled = reaches_end and sequence.output is Output.GENERATE
        return ScheduledSequence(sequence, num_tokens, sequence.num_rows if is_sampled else 0)

    def _with_drafts(self, plan: StepPlan, item: ScheduledSequence) -> ScheduledSequence:
        """Adds drafts from the step's remaining tokens, where blocks can be allocated for them."""
        sequence = item.sequence
        if self.drafter is None or item.num_choices != 1 or sequence.num_output_tokens == 0:
            return item
        room = sequence.max_num_tokens - sequence.num_tokens - 1  # beside the token of row 0
        most = max(0, min(room, plan.num_tokens, plan.num_drafts))
        drafts = self.drafter.propose(sequence)[:most]
        if not drafts or not self.kv.allocate_slots(sequence, item.num_tokens + len(drafts)):
            return item
        plan.num_tokens -= len(drafts)
        plan.num_drafts -= len(drafts)
        self.policy.ledger.charge(sequence.tenant, prefill=len(drafts))
        return replace(item, drafts=drafts)

    def _input(self, scheduled: list[ScheduledSequence]) -> StepInput:
        return StepInput(
            adapter_loads=self.adapter_slots.take_loads(),
            moves=self.kv.tiers.take_moves(),
            copies=tuple(self.kv.take_copies()),
            seq_ids=tuple(item.sequence.seq_id for item in scheduled),
            tokens=flatten(scheduled, self.kv),
            rows=logits_rows(scheduled, self.stops),
        )

    def _fork(self, parent: Sequence, num_choices: int) -> list[Sequence]:
        children = [parent.fork(index) for index in range(1, num_choices)]
        for child in children:
            self.kv.fork(parent, child)
            self.adapter_slots.retain_slot(parent, child)
            self.running.append(child)
            self.registry.add(child)
        return children

    def _append(self, sequence: Sequence, tokens: list[SampledToken]) -> list[SequenceUpdate]:
        """Appends tokens up to one that ends the sequence; the keys and values of all but the last
        were computed as drafts."""
        updates: list[SequenceUpdate] = []
        for token in tokens:
            sequence.token_ids.append(token.token_id)
            updates.append(self._update(sequence, token))
            if sequence.finish_reason is not None:
                break
        if len(updates) > 1:
            sequence.num_computed_tokens += len(updates) - 1
            self.kv.index_computed(sequence)
        if sequence.finish_reason is not None:
            self._end(sequence)
            sequence.status = SequenceStatus.FINISHED
        return updates

    def _update(self, sequence: Sequence, token: SampledToken) -> SequenceUpdate:
        """Applies a sequence's last token to it."""
        text = self.stops.check(sequence)
        return SequenceUpdate(
            sequence=sequence,
            token_id=token.token_id,
            position=sequence.num_output_tokens - 1,
            text=text,
            logprobs=token.logprobs,
            finish_reason=sequence.finish_reason,
        )

    def _preempt(self, sequence: Sequence) -> None:
        """Releases everything a sequence holds; its tokens, output included, are computed again
        later."""
        self.kv.free(sequence)
        self.adapter_slots.close(sequence)
        self.running.remove(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.kv.pool.metering.note_preemption(sequence.tenant)
        sequence.status = SequenceStatus.WAITING
        self.waiting.add(sequence)
        self.num_preemptions += 1

    def _keep(self, sequence: Sequence) -> None:
        """Pins a computed base prompt: it no longer runs, but its blocks stay."""
        self.running.remove(sequence)
        self.registry.remove(sequence)
        sequence.status = SequenceStatus.FINISHED

    def _end(self, sequence: Sequence) -> None:
        """Releases what a sequence holds, whether it finished or was aborted."""
        self.kv.free(sequence)
        self.adapter_slots.close(sequence)
        queue = self.waiting if sequence.status is SequenceStatus.WAITING else self.running
        queue.remove(sequence)
        self.registry.remove(sequence)

    def _store_prompt_logprobs(self, sequence: Sequence, result: StepOutput) -> None:
        if sequence.prompt_logprobs is not None:
            for position, logprobs in result.prompt_logprobs.get(sequence.seq_id, {}).items():
                sequence.prompt_logprobs[position] = logprobs
