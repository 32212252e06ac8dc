"""One request at a time, timed to its first token; base prompts and adapters made ready before."""

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from loraplex.adapters.manifest import AdapterRef, Folder
from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import (
    AdapterRegistered,
    BasePromptPublished,
    BasePromptRef,
    Event,
    GenerateRequest,
    PublishBasePrompt,
    RegisterAdapter,
    TokenEvent,
)

sys.path.append(str(Path(__file__).parents[1] / "serving"))
from make_adapters import make_adapters

Kind = TypeVar("Kind", bound=Event)
WAIT = 0.0005  # seconds between two looks at work that another thread does


@dataclass
class Answer:
    ttft: float = 0.0  # seconds from the request to its first token
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0


def ask(engine: LLMEngine, request: GenerateRequest) -> Answer:
    """Runs one request of one choice to its end."""
    answer = Answer()
    start = time.perf_counter()
    engine.add(request)
    while engine.has_work or engine.is_waiting:
        for event in _step(engine):
            if not isinstance(event, TokenEvent):
                raise RuntimeError(f"{event} in place of a token")
            if not answer.token_ids:
                answer.ttft = time.perf_counter() - start
            answer.token_ids += event.token_ids
            answer.logprobs += [item.chosen.logprob for item in event.logprobs or []]
            if event.usage is not None:
                answer.cached_tokens = event.usage.cached_tokens
    return answer


def publish(engine: LLMEngine, token_ids: list[int]) -> BasePromptRef:
    """Publishes a base prompt and waits until it is computed."""
    engine.submit(
        PublishBasePrompt(request_id="publish", prompt_id="base", version=1, token_ids=token_ids)
    )
    return _outcome(engine, BasePromptPublished).info.ref


def make_activated(
    model: Path, out: Path, count: int, rank: int, invocation: list[int]
) -> list[Path]:
    """Random adapters that act from the last occurrence of `invocation` on."""
    folders = list(make_adapters(model, out, count, rank).values())
    for folder in folders:
        path = folder / "adapter_config.json"
        config = json.loads(path.read_text()) | {"alora_invocation_tokens": invocation}
        path.write_text(json.dumps(config))
    return folders


def register(engine: LLMEngine, folder: Path, tenant: str = "tenant") -> AdapterRef:
    """Registers an adapter and waits until that is done."""
    engine.submit(
        RegisterAdapter(
            request_id="register", tenant=tenant, adapter_id=folder.name, source=Folder(str(folder))
        )
    )
    return _outcome(engine, AdapterRegistered).info.ref


def _outcome(engine: LLMEngine, kind: type[Kind]) -> Kind:
    while engine.has_work or engine.is_waiting:
        for event in _step(engine):
            if not isinstance(event, kind):
                raise RuntimeError(f"{event} in place of a {kind.__name__}")
            return event
    raise RuntimeError("no answer")


def _step(engine: LLMEngine) -> list[Event]:
    if not engine.has_work:
        time.sleep(WAIT)
    return engine.step()
