"""A whole LLMEngine above a toy model: all is real but the weights of the model and of adapters."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from support.engine.executors import AtOnce, OnDemand
from support.engine.kv import MAX_MODEL_LEN, TOKENIZER
from support.engine.offload import Clock
from support.engine.offloading import OffloadingHarness
from support.engine.scheduling import Answer, Setup
from support.models.toy_adapters import ToyAdapters
from support.models.toy_model import ToyModel
from support.models.word_tokenizer import EOS, VOCAB_SIZE

from loraplex.engine import llm_engine
from loraplex.engine.build.engine import EngineParts
from loraplex.engine.commands import adapters as adapter_commands
from loraplex.engine.config import EngineConfig
from loraplex.engine.kv.offload import disk_tier
from loraplex.engine.kv.recompute_cost import RecomputeCost
from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import (
    Event,
    GenerateRequest,
    PositionLogprobs,
    RequestFailed,
    TenantShare,
    TokenEvent,
)
from loraplex.engine.sequence import Sequence
from loraplex.engine.step import Logprobs, StepInput, StepOutput

SECONDS_PER_STEP = 0.25


class FloorChecker:
    """A runner that looks, before it computes a step, whether the scheduler has kept the floors."""

    recorded_steps = "none"

    def __init__(self, harness: OffloadingHarness) -> None:
        self._harness = harness

    def execute(self, step: StepInput) -> StepOutput:
        scheduler, budgets = self._harness.scheduler, self._harness.kv.pool.budgets
        if budgets.is_overdrawn:
            alive = [*scheduler.running, *scheduler.waiting]
            assert all(budgets.over_floor(sequence.tenant) >= 0 for sequence in alive)
        return self._harness.model.execute(step)


class WholeEngine:
    """Steps the engine, keeps what it says, and checks its books after every step.

    Nothing depends on time or threads: each step takes as long as any other, and the disk does one
    read in each.
    """

    def __init__(
        self, setup: Setup, num_host_slots: int, folder: Path | None = None, disk_bytes: int = 0
    ) -> None:
        """`folder`: of the disk tier; None: there is none."""
        self.setup = setup
        self._num_host_slots, self._folder, self._disk_bytes = num_host_slots, folder, disk_bytes
        self.answers: dict[tuple[str, int], Answer] = {}
        self.failures: dict[str, RequestFailed] = {}
        self.outcomes: list[Event] = []  # of all that is no request
        self._clock = Clock()
        self._open()

    def _open(self) -> None:
        self._disk_reads = OnDemand()
        threads = {"offload-write": AtOnce(), "offload-read": self._disk_reads}
        with patch.object(
            disk_tier,
            "ThreadPoolExecutor",
            lambda max_workers, thread_name_prefix: threads[thread_name_prefix],
        ):
            harness = OffloadingHarness(
                self.setup,
                num_host_slots=self._num_host_slots,
                folder=self._folder,
                disk_bytes=self._disk_bytes,
                clock=self._clock,
            )
        assert isinstance(harness.model, ToyModel)
        self.model, self.slots = harness.model, harness.slots
        self.scheduler, self.kv, self.offload = harness.scheduler, harness.kv, harness.offload
        self.budgets = self.kv.pool.budgets
        self.engine = _engine_over(harness)

    def restart(self, *, is_orderly: bool) -> None:
        """Another engine over the same disk; what was asked of the old one gets no answer."""
        if is_orderly:
            self.engine.save_cache()
        self.engine.close()
        earlier = self.model
        self._open()
        self.model.inherit(earlier)

    def add(self, request: GenerateRequest) -> Sequence:
        """Raises RequestRejected as the engine does."""
        self.engine.add(request)
        return max(self.scheduler.waiting, key=lambda sequence: sequence.arrival)

    def step(self, *, is_disk_stalled: bool = False) -> None:
        alive = {s.request_id for s in [*self.scheduler.running, *self.scheduler.waiting]}
        self._clock.now += SECONDS_PER_STEP
        self._disk_reads.work(not is_disk_stalled)
        for event in self.engine.step():
            match event:
                case TokenEvent():
                    self._keep(event)
                case RequestFailed() if event.request_id in alive:
                    self.failures[event.request_id] = event
                case _:
                    self.outcomes.append(event)
        self.check_books()

    def run(self, max_steps: int) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work and not self.engine.is_waiting:
                return
            self.step()
        raise AssertionError("the work does not end")

    def set_share(self, tenant: str, floor: int, ceiling: int | None, weight: float) -> None:
        """Raises RequestRejected as the engine does."""
        share = TenantShare(tenant, floor, ceiling, weight)
        self.engine.submit(llm_engine.SetTenantShares("shares", [share]))

    def check_books(self) -> None:
        self.kv.check_integrity()
        self.offload.check_integrity()
        self.slots.pool.check_integrity()

    def _keep(self, event: TokenEvent) -> None:
        answer = self.answers.setdefault((event.request_id, event.index), Answer())
        assert answer.finish_reason is None, "a token came after the end"
        answer.token_ids += event.token_ids
        answer.text += event.text
        answer.logprobs += map(_numbers, event.logprobs or [None])
        if event.prompt_logprobs is not None:
            answer.prompt_logprobs = list(map(_numbers, event.prompt_logprobs))
        answer.finish_reason, answer.stop_reason = event.finish_reason, event.stop_reason
        if event.usage is not None:
            answer.usage = (event.usage.prompt_tokens, event.usage.completion_tokens)


def _numbers(logprobs: PositionLogprobs | None) -> Logprobs | None:
    """What is left of log-probabilities without the texts."""
    if logprobs is None:
        return None
    own, top = logprobs.chosen, logprobs.top
    pairs = tuple((entry.token_id, entry.logprob) for entry in top)
    return Logprobs(own.token_id, own.logprob, own.rank, pairs)


def _engine_over(harness: OffloadingHarness) -> LLMEngine:
    setup = harness.setup
    loaded: Any = SimpleNamespace(
        model=SimpleNamespace(config=SimpleNamespace(model_type="toy")),
        revision="1",
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        eos_token_ids={EOS},
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    adapters: Any = ToyAdapters(harness.slots, harness.scheduler)
    runner: Any = FloorChecker(harness)
    prefault: Any = SimpleNamespace(prepare=lambda: False)
    parts = EngineParts(
        loaded, TOKENIZER, Path(), adapters, harness.scheduler, runner, RecomputeCost(), prefault
    )
    config = EngineConfig(
        model="toy",
        adapter_store="toy",
        block_size=setup.block_size,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
    )
    with patch.object(adapter_commands, "ThreadPoolExecutor", lambda **options: AtOnce()):
        return LLMEngine(config, parts)
