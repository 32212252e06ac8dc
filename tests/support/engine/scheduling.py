"""A scheduler at work: everything real but the model, and each answer kept for comparison."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from support.engine.adapter_slots import NamedSlots
from support.engine.kv import MAX_MODEL_LEN, TOKENIZER, adapter_ref, kv_manager
from support.models.constant_model import ConstantModel
from support.models.toy_model import ToyModel
from support.models.word_tokenizer import EOS

from loraplex.engine.kv.block_pool import KVCacheBlock
from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.kv.storage.groups import KVGroup
from loraplex.engine.kv.storage.layer_state import FullAttention, SlidingWindow
from loraplex.engine.protocol import (
    BasePromptRef,
    FinishReason,
    GenerateRequest,
)
from loraplex.engine.request_seeds import RequestSeeds
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduling.adapter_slots import AdapterSlots
from loraplex.engine.scheduling.fair_share import FairPolicy
from loraplex.engine.scheduling.policy import SchedulingPolicy
from loraplex.engine.scheduling.scheduler import (
    Scheduler,
    SchedulerLimits,
    SchedulerOutput,
    SequenceUpdate,
)
from loraplex.engine.scheduling.stop_checker import StopChecker
from loraplex.engine.sequence import Sequence
from loraplex.engine.step import Logprobs
from loraplex.engine.text.detokenizer import Detokenizer
from loraplex.engine.worker.sampler import Sampler

GROUPS = [KVGroup((0,), FullAttention()), KVGroup((1,), SlidingWindow(6))]


@dataclass
class Answer:
    """All that a caller sees of one choice, except what was cached."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Logprobs | None] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: tuple[int, int] | None = None  # prompt and completion tokens

    def add(self, update: SequenceUpdate) -> None:
        assert self.finish_reason is None, "a token came after the end"
        assert update.position == len(self.token_ids)
        sequence = update.sequence
        self.token_ids.append(update.token_id)
        self.text += update.text
        self.logprobs.append(update.logprobs)
        self.prompt_logprobs = sequence.prompt_logprobs
        self.finish_reason, self.stop_reason = update.finish_reason, sequence.stop_reason
        if update.finish_reason is not None:
            self.usage = (sequence.num_prompt_tokens, sequence.num_output_tokens)


@dataclass(frozen=True)
class Setup:
    num_blocks: int = 200
    block_size: int = 4
    groups: list[KVGroup] = field(default_factory=lambda: GROUPS)
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    max_logits_rows: int = 64
    num_slots: int = 2
    load_delay: int = 0
    adapter_bytes: Mapping[str, int] = field(default_factory=dict)
    adapter_wait: float = 2.0


def generate_request(  # noqa: PLR0913 - one parameter per field that tests set
    request_id: str,
    prompt: list[int],
    *,
    adapter: str | None = None,
    tenant: str = "tenant",
    namespace: str = "namespace",
    priority: int = 0,
    base_prompt: BasePromptRef | None = None,
    **sampling: Any,
) -> GenerateRequest:
    """Greedy unless asked otherwise; the adapter is named."""
    return GenerateRequest(
        request_id=request_id,
        tenant=tenant,
        namespace=namespace,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 8} | sampling),
        adapter=adapter_ref(adapter) if adapter else None,
        priority=priority,
        base_prompt=base_prompt,
    )


class SchedulerHarness:
    """Steps a scheduler and checks in every step what must hold in every step."""

    def __init__(
        self,
        setup: Setup | None = None,
        clock: Callable[[], float] | None = None,
        policy: SchedulingPolicy | None = None,
        kv: KVCacheManager | None = None,
    ) -> None:
        self.setup = setup or Setup()
        self.kv = kv or kv_manager(
            self.setup.num_blocks,
            self.setup.block_size,
            self.setup.groups,
            chunk=self.setup.max_num_batched_tokens,
        )
        self.slots = NamedSlots(
            self.setup.num_slots, self.setup.load_delay, self.setup.adapter_bytes
        )
        self.stops = StopChecker(frozenset({EOS}))
        adapter_slots = AdapterSlots(self.slots, self.setup.adapter_wait, clock or (lambda: 0.0))
        limits = SchedulerLimits(
            self.setup.max_num_seqs, self.setup.max_num_batched_tokens, self.setup.max_logits_rows
        )
        self.scheduler = Scheduler(
            self.kv, adapter_slots, policy or FairPolicy(), limits, self.stops
        )
        self.model: ToyModel | ConstantModel = ToyModel(
            self.kv, self.slots, Sampler(), lambda: self.scheduler.running
        )
        self.answers: dict[tuple[str, int], Answer] = {}
        self.num_cached: dict[str, int] = {}
        self.hoard: list[KVCacheBlock] = []

    def add(self, request: GenerateRequest, adapter_start: int = 0, frontier: int = 0) -> Sequence:
        sampling = request.sampling
        detokenizer = Detokenizer(
            TOKENIZER,
            request.prompt_token_ids,
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
        )
        sequence = Sequence(
            request,
            detokenizer,
            seed=RequestSeeds(0).of(request.sampling),
            max_len=MAX_MODEL_LEN,
            adapter_start=adapter_start,
            frontier=frontier,
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self._check(output)
        result = self.model.execute(output.step)
        for update in self.scheduler.update(output, result):
            sequence = update.sequence
            key = (sequence.request_id, sequence.index)
            self.answers.setdefault(key, Answer()).add(update)
            self.num_cached[sequence.request_id] = sequence.num_cached_tokens or 0
        if not self.hoard:
            self.kv.check_integrity()
        self.slots.pool.check_integrity()
        return output

    def run(self, max_steps: int = 500) -> int:
        """Steps until nothing is left; returns how many steps that took."""
        for num_steps in range(max_steps):
            if not self.scheduler.running and not self.scheduler.waiting:
                return num_steps
            self.step()
        raise AssertionError("the work does not end")

    def close(self) -> None:
        """Lets go of a disk, where there is one."""

    def take_memory(self) -> None:
        """Takes all free blocks, so that the next one needed costs a preemption."""
        self.hoard += [self.kv.pool.allocate("hoard") for _ in range(self.kv.pool.num_free)]

    def give_memory_back(self) -> None:
        self.kv.pool.release(self.hoard)
        self.hoard = []

    def check_nothing_is_held(self) -> None:
        self.kv.check_integrity()
        assert self.kv.pool.num_free == self.setup.num_blocks
        assert self.slots.pool.num_references == 0

    def _check(self, output: SchedulerOutput) -> None:
        assert output.num_tokens <= self.setup.max_num_batched_tokens
        assert all(item.num_tokens >= 1 for item in output.scheduled)
        scheduled = [item.sequence for item in output.scheduled]
        assert len(set(scheduled)) == len(scheduled)
        assert set(scheduled) == set(self.scheduler.running)
        choices = [1 if s.num_output_tokens else s.sampling.n for s in scheduled]
        assert sum(choices) <= self.setup.max_num_seqs


def undisturbed(
    request: GenerateRequest,
    adapter_start: int = 0,
    frontier: int = 0,
    groups: list[KVGroup] | None = None,
) -> list[Answer]:
    """The request's choices when it has an engine to itself, in one prefill and cold."""
    harness = SchedulerHarness(
        Setup(max_num_batched_tokens=256, max_logits_rows=256, groups=groups or GROUPS)
    )
    harness.add(request, adapter_start, frontier)
    harness.run()
    return [harness.answers[request.request_id, i] for i in range(request.sampling.n)]
