"""A real model's answers are the same when its sequences are preempted, at any step or all.

To the bit where their blocks leave and come back; as near as the order of sums allows where they
are computed again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
from support.alike import assert_alike
from support.engine.engines import Choice, make_engine, register, request, run
from support.engine.preempting import flush_cache, preempt_all
from support.models.adapters import PEFT_NOISE, write_adapter
from support.models.architectures import write_checkpoint

from loraplex.adapters.manifest import AdapterRef
from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import Event, FinishReason, GenerateRequest, TokenEvent

pytestmark = [*PEFT_NOISE, pytest.mark.device]

PROMPT = [(7 * i) % 61 + 1 for i in range(27)]
CHUNK = 8  # tokens of the prompt in a step
NUM_TOKENS = 24  # of the answer at least; then a stop string ends it
EVERYTHING: dict[str, Any] = {
    "temperature": 1.0,
    "seed": 11,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logprobs": 2,
    "max_tokens": 40,
}
KINDS: dict[str, dict[str, Any]] = {
    "one choice": {},
    "two choices": {"n": 2},
    "greedy": {"temperature": 0.0},
    "prompt logprobs": {"prompt_logprobs": 1},
    "an adapter": {"adapted": True},
}
NAMESPACES = map(str, count())  # a new one for each request, which so finds nothing cached
ANY_STEP = [
    kind if kind == "one choice" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS
]
When = Callable[[int, list[Event]], bool]  # the number of the step, and what came of it


@dataclass(frozen=True)
class Served:
    engine: LLMEngine
    adapter: AdapterRef


def serve(
    tmp_path_factory: pytest.TempPathFactory, architecture: str, **settings: Any
) -> Iterator[Served]:
    base = write_checkpoint(tmp_path_factory.mktemp("base"), architecture)
    engine = make_engine(
        base,
        tmp_path_factory.mktemp("store") / "adapters",
        max_num_batched_tokens=CHUNK,
        kv_cache_memory=1 << 20,
        **settings,
    )
    folder = tmp_path_factory.mktemp("adapter") / "a"
    write_adapter(base, folder, 1, r=4, target_modules="all-linear")
    yield Served(engine, register(engine, folder).ref)
    engine.close()


@pytest.fixture(
    scope="module",
    params=[("gemma3_text", "float32"), ("gemma3_text", "bfloat16"), ("llama", "float32")],
    ids=" ".join,
)
def offloading(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Blocks of one token: none is computed twice, so nothing can differ."""
    architecture, dtype = request.param
    settings = {"dtype": dtype, "block_size": 1, "offload_memory": 4 << 20}
    yield from serve(tmp_path_factory, architecture, **settings)


@pytest.fixture(scope="module", params=["gemma3_text", "llama"])
def forgetful(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Nothing is below the device: what leaves it is computed again."""
    yield from serve(tmp_path_factory, request.param)


def ended_by_a_stop_string(served: Served, kind: str) -> dict[str, Any]:
    """The request's options; the string is one that the answer has late, and nowhere before."""
    options = EVERYTHING | KINDS[kind]
    if options.pop("adapted", False):
        options["adapter"] = served.adapter
    free = run(served.engine, [request(PROMPT, "free", namespace=next(NAMESPACES), **options)])
    text = free["free"][0].text
    end = next(n for n in count(2 * len(text) // 3) if text.find(text[n : n + 2]) == n)
    return options | {"stop": (text[end : end + 2],)}


def interrupted(engine: LLMEngine, item: GenerateRequest, when: When) -> list[Choice]:
    """The choices of a request that loses all its blocks behind each such step."""
    choices = [Choice() for _ in range(item.sampling.n)]
    engine.add(item)
    for number in count(1):
        events = engine.step()
        for event in events:
            assert isinstance(event, TokenEvent)
            choices[event.index].add(event)
        if not engine.has_work:
            break
        if when(number, events):
            preempt_all(engine._scheduler)
            flush_cache(engine._scheduler)
    return choices


def at_every_step(number: int, events: list[Event]) -> bool:
    """Apart from those that a lost prompt takes to be computed again."""
    return number * CHUNK < len(PROMPT) or bool(events)


def num_steps(choices: list[Choice]) -> int:
    assert choices[0].finish_reason is FinishReason.STOP
    assert len(choices[0].token_ids) >= NUM_TOKENS
    longest = max(len(choice.token_ids) for choice in choices)
    return -(-len(PROMPT) // CHUNK) + longest - 1


@pytest.mark.parametrize("kind", ANY_STEP)
def test_blocks_that_left_at_any_step_give_the_same_bits(offloading: Served, kind: str) -> None:
    engine, options = offloading.engine, ended_by_a_stop_string(offloading, kind)
    alone = run(engine, [request(PROMPT, "r", namespace=next(NAMESPACES), **options)])["r"]
    before = engine.stats().offload.in_bytes

    for step in range(1, num_steps(alone)):
        item = request(PROMPT, "r", namespace=next(NAMESPACES), **options)
        assert interrupted(engine, item, lambda number, _, at=step: number == at) == alone

    assert engine.stats().offload.in_bytes > before


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_left_at_every_step_give_the_same_bits(offloading: Served, kind: str) -> None:
    engine, options = offloading.engine, ended_by_a_stop_string(offloading, kind)
    alone = run(engine, [request(PROMPT, "r", namespace=next(NAMESPACES), **options)])["r"]
    before = engine.stats().offload.in_bytes

    item = request(PROMPT, "r", namespace=next(NAMESPACES), **options)
    assert interrupted(engine, item, at_every_step) == alone

    assert engine.stats().offload.in_bytes > before


@pytest.mark.parametrize("kind", ANY_STEP)
def test_blocks_that_were_lost_at_any_step_are_computed_again(forgetful: Served, kind: str) -> None:
    engine, options = forgetful.engine, ended_by_a_stop_string(forgetful, kind)
    alone = run(engine, [request(PROMPT, "r", namespace=next(NAMESPACES), **options)])["r"]

    for step in range(1, num_steps(alone)):
        item = request(PROMPT, "r", namespace=next(NAMESPACES), **options)
        found = interrupted(engine, item, lambda number, _, at=step: number == at)
        for given, expected in zip(found, alone, strict=True):
            assert_alike(given, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_were_lost_at_every_step_are_computed_again(
    forgetful: Served, kind: str
) -> None:
    engine, options = forgetful.engine, ended_by_a_stop_string(forgetful, kind)
    alone = run(engine, [request(PROMPT, "r", namespace=next(NAMESPACES), **options)])["r"]

    item = request(PROMPT, "r", namespace=next(NAMESPACES), **options)
    found = interrupted(engine, item, at_every_step)

    for given, expected in zip(found, alone, strict=True):
        assert_alike(given, expected)


def test_no_tier_gives_the_base_model_what_an_adapter_left(offloading: Served) -> None:
    engine = offloading.engine
    cold = run(engine, [request(PROMPT, "cold", namespace="cold")])["cold"]
    run(engine, [request(PROMPT, "adapted", namespace="shared", adapter=offloading.adapter)])
    flush_cache(engine._scheduler)

    base = run(engine, [request(PROMPT, "base", namespace="shared")])["base"]

    assert base == cold
