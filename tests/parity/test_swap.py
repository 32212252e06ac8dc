"""A real model's answers are the same, to the bit, when its blocks leave and come back."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from support.adapters import PEFT_NOISE, write_adapter
from support.architectures import write_checkpoint
from support.engines import Choice, make_engine, register, request, run

from loraplex.adapters.manifest import AdapterRef
from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import GenerateRequest, TokenEvent

pytestmark = PEFT_NOISE

PROMPT = [(7 * i) % 61 + 1 for i in range(21)]
STEPS = (1, 2, 5, 9)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 3},
    "penalties": {
        "temperature": 1.0,
        "seed": 11,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "logprobs": 1,
    },
    "prompt logprobs": {"prompt_logprobs": 1},
    "an adapter": {"logprobs": 1, "adapted": True},
    "two choices": {"n": 2, "temperature": 1.0, "seed": 5},
}


@dataclass(frozen=True)
class Served:
    engine: LLMEngine
    adapter: AdapterRef


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Blocks of one token: none is computed twice, so nothing can differ."""
    base = write_checkpoint(tmp_path_factory.mktemp("base"), "gemma3_text")
    engine = make_engine(
        base,
        tmp_path_factory.mktemp("store") / "adapters",
        dtype=request.param,
        block_size=1,
        max_num_batched_tokens=16,
        kv_cache_memory=1 << 20,
        swap_memory=4 << 20,
    )
    folder = tmp_path_factory.mktemp("adapter") / "a"
    write_adapter(base, folder, 1, r=4, target_modules="all-linear")
    yield Served(engine, register(engine, folder).ref)
    engine.close()


def swap_out(engine: LLMEngine) -> None:
    """Preempts all that runs, and evicts what it leaves."""
    scheduler, pool = engine._scheduler, engine._scheduler.kv.pool
    for sequence in list(scheduler.running):
        scheduler._preempt(sequence)
    pool.release([pool.allocate("other") for _ in range(pool.num_available("other"))])


def interrupted(engine: LLMEngine, item: GenerateRequest, step: int) -> list[Choice]:
    """The choices of a request that is swapped out after some steps."""
    choices = [Choice() for _ in range(item.sampling.n)]
    engine.add(item)
    events = [event for _ in range(step) for event in engine.step()]
    swap_out(engine)
    while engine.has_work:
        events += engine.step()
    for event in events:
        assert isinstance(event, TokenEvent)
        choices[event.index].add(event)
    return choices


@pytest.mark.parametrize("kind", KINDS)
def test_swapped_blocks_give_the_same_bits(served: Served, kind: str) -> None:
    engine, options = served.engine, dict(KINDS[kind])
    if options.pop("adapted", False):
        options["adapter"] = served.adapter
    alone = run(engine, [request(PROMPT, "alone", namespace=f"{kind} alone", **options)])["alone"]
    before = engine.stats().swap_in_bytes

    for step in STEPS:
        item = request(PROMPT, f"{step}", namespace=f"{kind} {step}", **options)
        assert interrupted(engine, item, step) == alone

    assert engine.stats().swap_in_bytes > before


def test_no_tier_gives_the_base_model_what_an_adapter_left(served: Served) -> None:
    engine = served.engine
    cold = run(engine, [request(PROMPT, "cold", namespace="cold")])["cold"]
    run(engine, [request(PROMPT, "adapted", namespace="shared", adapter=served.adapter)])
    swap_out(engine)

    base = run(engine, [request(PROMPT, "base", namespace="shared")])["base"]

    assert base == cold
