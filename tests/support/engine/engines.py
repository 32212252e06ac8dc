"""Drives an in-process LLMEngine to the end of its work."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loraplex.adapters.manifest import AdapterRef, Folder
from loraplex.engine.config import EngineConfig
from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import (
    AdapterInfo,
    AdapterRegistered,
    BasePromptPublished,
    BasePromptRef,
    Event,
    FinishReason,
    GenerateRequest,
    PositionLogprobs,
    PublishBasePrompt,
    RegisterAdapter,
    RequestFailed,
    RetireBasePrompt,
    TokenEvent,
    Usage,
)
from loraplex.engine.sampling_params import SamplingParams


@dataclass
class Choice:
    """All that came of one choice of one request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None

    def add(self, event: TokenEvent) -> None:
        assert self.finish_reason is None, "a token came after the end"
        self.token_ids += event.token_ids
        self.text += event.text
        self.logprobs += event.logprobs or []
        self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
        self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason
        self.usage = event.usage


def make_engine(model: Path, store: Path, **settings: Any) -> LLMEngine:
    """A small float32 engine; block size 4, so that a few tokens cross many borders."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "kv_cache_memory": 8 << 20,
        "num_threads": 1,
    }
    return LLMEngine.load(
        EngineConfig(model=str(model), adapter_store=str(store), **defaults | settings)
    )


def request(
    prompt: list[int],
    request_id: str = "r",
    *,
    tenant: str = "t",
    namespace: str = "n",
    adapter: AdapterRef | None = None,
    **options: Any,
) -> GenerateRequest:
    """Greedy and without end of sequence, unless told otherwise.

    `options`: other fields of the request, or of its sampling.
    """
    fields = {name: options.pop(name) for name in ("base_prompt", "priority") if name in options}
    defaults: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8}
    return GenerateRequest(
        request_id=request_id,
        tenant=tenant,
        namespace=namespace,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**defaults | options),
        adapter=adapter,
        **fields,
    )


def run(engine: LLMEngine, requests: Iterable[GenerateRequest]) -> dict[str, list[Choice]]:
    """Adds the requests together and steps until all have ended; choices by request id."""
    results: dict[str, list[Choice]] = {}
    for item in requests:
        engine.add(item)
        results[item.request_id] = [Choice() for _ in range(item.sampling.n)]
    for event in drain(engine):
        assert isinstance(event, TokenEvent), event
        results[event.request_id][event.index].add(event)
    return results


def run_one(engine: LLMEngine, item: GenerateRequest) -> Choice:
    return run(engine, [item])[item.request_id][0]


def drain(engine: LLMEngine) -> list[Event]:
    """Steps until nothing is left to do; all events on the way."""
    events: list[Event] = []
    while engine.has_work or engine.is_waiting:
        events += engine.step()
        if not engine.has_work and engine.is_waiting:
            time.sleep(0.002)
    return events


def register(engine: LLMEngine, folder: Path, *, tenant: str = "t", **options: Any) -> AdapterInfo:
    """Registers a PEFT folder and waits for the outcome, which must be good."""
    outcome = try_register(engine, folder, tenant=tenant, **options)
    assert isinstance(outcome, AdapterRegistered), outcome
    return outcome.info


def try_register(
    engine: LLMEngine, folder: Path, *, tenant: str = "t", **options: Any
) -> AdapterRegistered | RequestFailed:
    """`options`: fields of `RegisterAdapter`; the folder's name is the adapter's by default."""
    fields = {"adapter_id": folder.name, "source": Folder(str(folder))} | options
    engine.submit(RegisterAdapter(request_id="reg", tenant=tenant, **fields))
    (outcome,) = drain(engine)
    assert isinstance(outcome, AdapterRegistered | RequestFailed)
    return outcome


def publish(
    engine: LLMEngine, token_ids: list[int], prompt_id: str = "prompt", version: int = 1
) -> BasePromptRef:
    """Publishes a base prompt and waits until it is computed."""
    engine.submit(
        PublishBasePrompt(
            request_id="pub", prompt_id=prompt_id, version=version, token_ids=token_ids
        )
    )
    (outcome,) = drain(engine)
    assert isinstance(outcome, BasePromptPublished), outcome
    return outcome.info.ref


def retire(engine: LLMEngine, ref: BasePromptRef, request_id: str = "retire") -> None:
    engine.submit(
        RetireBasePrompt(request_id=request_id, prompt_id=ref.prompt_id, version=ref.version)
    )
