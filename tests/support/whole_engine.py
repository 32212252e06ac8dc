"""A whole LLMEngine above a toy model: all is real but the weights of the model and of adapters."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from support.adapter_slots import NamedSlots
from support.kv import MAX_MODEL_LEN, TOKENIZER
from support.scheduling import Answer, Setup
from support.swapping import SwappingHarness
from support.word_tokenizer import EOS, VOCAB_SIZE

from loraplex.adapters.manager import LoRAStats
from loraplex.adapters.manifest import Activation, AdapterRef
from loraplex.engine import llm_engine
from loraplex.engine.assembly import EngineParts
from loraplex.engine.config import EngineConfig
from loraplex.engine.kv_cache_manager import KVCacheManager
from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import (
    Event,
    GenerateRequest,
    RequestFailed,
    TenantShare,
    TokenEvent,
)
from loraplex.engine.scheduler import ModelRunnerOutput, SchedulerOutput
from loraplex.engine.sequence import Sequence

INVOCATION = [3, 3]


class ToyAdapters:
    """The door to adapters that have slots and terms, but no weights: "b" acts behind the base
    prompt, "c" from its invocation on, all others on every token."""

    def __init__(self, slots: NamedSlots) -> None:
        self._slots = slots

    def info(self, ref: AdapterRef) -> SimpleNamespace:
        activations = {"b": Activation.AFTER_PROMPT, "c": Activation.INVOCATION}
        activation = activations.get(ref.adapter_id, Activation.ALWAYS)
        return SimpleNamespace(activation=activation, frontier=0)

    def manifest(self, ref: AdapterRef) -> SimpleNamespace:
        return SimpleNamespace(invocation_tokens=INVOCATION)

    def prepare(self, ref: AdapterRef) -> bool:
        return self._slots.prepare(ref)

    def load_error(self, ref: AdapterRef) -> None:
        return None

    def stats(self) -> LoRAStats:
        return LoRAStats(*[0] * 7)

    def close(self) -> None:
        pass


class FloorChecker:
    """A runner that looks, before it computes a step, whether the scheduler has kept the floors."""

    def __init__(self, harness: SwappingHarness) -> None:
        self._harness = harness

    def execute(self, output: SchedulerOutput, kv: KVCacheManager) -> ModelRunnerOutput:
        scheduler, budgets = self._harness.scheduler, kv.pool.budgets
        if budgets.is_overdrawn:
            alive = [*scheduler.running, *scheduler.waiting]
            assert all(budgets.over_floor(sequence.tenant) >= 0 for sequence in alive)
        return self._harness.model.execute(output, kv)


class WholeEngine:
    """Steps the engine, keeps what it says, and checks its books after every step."""

    def __init__(self, setup: Setup, num_host_slots: int) -> None:
        harness = SwappingHarness(setup, num_host_slots=num_host_slots)
        self.setup, self.slots = setup, harness.slots
        self.scheduler, self.kv, self.swap = harness.scheduler, harness.kv, harness.swap
        self.budgets = self.kv.pool.budgets
        self.engine = _engine_over(harness)
        self.answers: dict[tuple[str, int], Answer] = {}
        self.failures: dict[str, RequestFailed] = {}
        self.outcomes: list[Event] = []  # of all that is no request

    def add(self, request: GenerateRequest) -> Sequence:
        """Raises RequestRejected as the engine does."""
        self.engine.add(request)
        return max(self.scheduler.waiting, key=lambda sequence: sequence.arrival)

    def step(self) -> None:
        alive = {s.request_id for s in [*self.scheduler.running, *self.scheduler.waiting]}
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
        self.engine.set_tenant_shares(llm_engine.SetTenantShares("shares", [share]))

    def check_books(self) -> None:
        self.kv.check_integrity()
        self.swap.check_integrity()
        self.slots.pool.check_integrity()

    def _keep(self, event: TokenEvent) -> None:
        answer = self.answers.setdefault((event.request_id, event.index), Answer())
        assert answer.finish_reason is None, "a token came after the end"
        answer.token_ids += event.token_ids
        answer.text += event.text
        answer.logprobs += event.logprobs or [None]
        answer.prompt_logprobs = event.prompt_logprobs or answer.prompt_logprobs
        answer.finish_reason, answer.stop_reason = event.finish_reason, event.stop_reason
        if event.usage is not None:
            answer.usage = (event.usage.prompt_tokens, event.usage.completion_tokens)


def _engine_over(harness: SwappingHarness) -> LLMEngine:
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
    adapters: Any = ToyAdapters(harness.slots)
    runner: Any = FloorChecker(harness)
    warmth: Any = SimpleNamespace(prepare=lambda: False)
    parts = EngineParts(
        loaded, TOKENIZER, Path(), adapters, harness.scheduler, runner, harness.recompute, warmth
    )
    config = EngineConfig(
        model="toy",
        adapter_store="toy",
        block_size=setup.block_size,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
    )
    with patch.object(llm_engine, "assemble", lambda config, on_progress: parts):
        return LLMEngine(config)
