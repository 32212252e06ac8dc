"""What an answer is must not depend on what runs beside it, on chunks, blocks or preemption."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.alike import assert_alike
from support.engine.engines import Choice, make_engine, register, request, run, run_one
from support.models.adapters import PEFT_NOISE, write_adapter
from support.models.architectures import VOCAB_SIZE, write_checkpoint

from loraplex.adapters.manifest import AdapterRef
from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import EngineStats, GenerateRequest

pytestmark = PEFT_NOISE

NUM_REQUESTS = 10
ADAPTERS: dict[str, dict[str, Any]] = {
    "wide": {"r": 12, "target_modules": "all-linear"},
    "narrow": {"r": 2, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "lm_head"]},
    "activated": {
        "r": 6,
        "target_modules": "all-linear",
        "alora_invocation_tokens": [40, 41],
    },
}
# Blocks of one sequence at the longest: small enough to preempt, large enough for one.
SETTINGS: list[dict[str, Any]] = [
    {"block_size": 4, "max_num_batched_tokens": 8, "kv_cache_memory": 200_000},
    {"block_size": 1, "max_num_batched_tokens": 11, "kv_cache_memory": 200_000},
    {"block_size": 16, "max_num_batched_tokens": 16, "kv_cache_memory": 330_000},
    {"block_size": 3, "max_num_batched_tokens": 64, "max_adapter_slots": 1, "adapter_wait": 0.0},
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("base"), "gemma3_text", max_position_embeddings=96
    )


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    parent = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(base, parent / name, seed, **config)
        for seed, (name, config) in enumerate(ADAPTERS.items())
    ]


@pytest.fixture(scope="module")
def serial(
    base: Path, folders: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLMEngine]:
    engine = make_engine(
        base, tmp_path_factory.mktemp("store"), max_num_seqs=4, max_num_batched_tokens=96
    )
    for folder in folders:
        register(engine, folder)
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda s: f"block{s['block_size']}")
def crowded(
    request: pytest.FixtureRequest,
    base: Path,
    folders: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LLMEngine]:
    engine = make_engine(base, tmp_path_factory.mktemp("store"), **request.param)
    for folder in folders:
        register(engine, folder)
    yield engine
    engine.close()


@pytest.mark.parametrize("seed", range(3))
def test_answers_in_a_crowd_are_those_given_alone(
    serial: LLMEngine, crowded: LLMEngine, refs: list[AdapterRef | None], seed: int
) -> None:
    requests = _random_requests(random.Random(seed), refs)
    alone = {r.request_id: _alone(serial, r) for r in requests}
    together = run(crowded, requests)
    for request_id, choices in together.items():
        assert len(choices) == len(alone[request_id])
        for given, expected in zip(choices, alone[request_id], strict=True):
            assert_alike(given, expected)


def test_nothing_is_left_behind(crowded: LLMEngine, refs: list[AdapterRef | None]) -> None:
    run(crowded, _random_requests(random.Random(99), refs))
    stats = crowded.stats()
    assert (stats.num_free_blocks, stats.adapters.references) == (stats.num_blocks, 0)


@pytest.mark.parametrize(
    "crowded", SETTINGS[:3], indirect=True, ids=["block4", "block1", "block16"]
)
def test_the_small_pools_did_preempt(crowded: LLMEngine, refs: list[AdapterRef | None]) -> None:
    stats = _run_until_preempted(crowded, refs)
    assert stats.num_preemptions > 0


@pytest.fixture
def refs(folders: list[Path], serial: LLMEngine) -> list[AdapterRef | None]:
    return [None, *(register(serial, folder).ref for folder in folders)]


def _run_until_preempted(engine: LLMEngine, refs: list[AdapterRef | None]) -> EngineStats:
    for seed in range(5):
        if engine.stats().num_preemptions:
            break
        run(engine, _random_requests(random.Random(seed), refs))
    return engine.stats()


def _random_requests(
    chooser: random.Random, refs: list[AdapterRef | None]
) -> list[GenerateRequest]:
    return [
        request(
            _random_prompt(chooser),
            f"r{index}",
            adapter=chooser.choice(refs),
            priority=chooser.choice([0, 0, 1]),
            max_tokens=chooser.randint(3, 24),
            n=chooser.choice([1, 1, 1, 2, 3]),
            logprobs=chooser.choice([None, 2]),
            prompt_logprobs=chooser.choice([None, None, 1]),
            **_random_sampling(chooser),
        )
        for index in range(NUM_REQUESTS)
    ]


def _random_prompt(chooser: random.Random) -> list[int]:
    shared = [(5 * i + 11) % (VOCAB_SIZE - 3) + 3 for i in range(chooser.choice([0, 9, 24]))]
    own = [chooser.randrange(3, VOCAB_SIZE) for _ in range(chooser.randint(1, 24))]
    return [*shared, *chooser.choice([[], [40, 41]]), *own]


def _random_sampling(chooser: random.Random) -> dict[str, Any]:
    return chooser.choice(
        [
            {},
            {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
            {"temperature": 0.9, "seed": 5, "top_p": 0.9},
            {"temperature": 1.3, "seed": -3, "top_k": 12, "min_p": 0.01},
            {
                "ignore_eos": False,
                "min_tokens": 3,
                "stop": ("e", "th", " a"),
                "temperature": 1.0,
                "seed": 8,
            },
        ]
    )


def _alone(engine: LLMEngine, item: GenerateRequest) -> list[Choice]:
    if item.sampling.n == 1:
        return [run_one(engine, item)]
    return run(engine, [item])[item.request_id]
