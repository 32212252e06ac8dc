"""A row's bits depend on its sequence alone: not on chunks, cached prefixes, neighbours or threads.

Log-probabilities are compared to the bit, on prompts long enough to be cut by attention, and on
layers as wide as those of a real model.
"""

import random
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from support.engine.engines import Choice, make_engine, register, request, run, run_one
from support.models.adapters import PEFT_NOISE, write_adapter
from support.models.architectures import VOCAB_SIZE, write_checkpoint

from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import GenerateRequest, PositionLogprobs
from loraplex.kernels.native import library
from loraplex.kernels.native.build import TARGETS, Target, cpu_flags

pytestmark = PEFT_NOISE

# As Gemma 3 270M, but for the number of layers and tokens.
SIZES: dict[str, Any] = {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 512,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
}
LENGTHS = [257, 258, 600, 1025]  # two of which leave one token, and one two, to a second asking
BLOCK = 8
FORMATS: dict[str, dict[str, str]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "float32": {"dtype": "float32"},
}
ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
THREADS = 2
CROWDED: dict[str, dict[str, int]] = {  # in chunks of so many tokens
    "96": {"max_num_batched_tokens": 96, "num_threads": 1},
    "301": {"max_num_batched_tokens": 301, "num_threads": 3},
}
Answer: TypeAlias = tuple[list[int], list[PositionLogprobs], list[PositionLogprobs | None] | None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), "gemma3_text", **SIZES)


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "wide"
    return write_adapter(model, folder, 1, r=16, target_modules="all-linear")


@pytest.mark.parametrize(
    ("kernels", "numbers"),
    [
        ("auto", "bfloat16"),
        ("auto", "int8"),
        ("auto", "float32"),
        ("naive", "bfloat16"),
        pytest.param("naive", "int8", marks=pytest.mark.slow),
        pytest.param("naive", "float32", marks=pytest.mark.slow),
    ],
)
def test_an_answer_has_the_same_bits_however_it_comes_about(
    model: Path, adapter: Path, kernels: str, numbers: str, tmp_path: Path
) -> None:
    _check(model, adapter, tmp_path, kernels=kernels, **FORMATS[numbers])


@pytest.mark.slow
@pytest.mark.parametrize("numbers", FORMATS)
@pytest.mark.parametrize("target", TARGETS[1:], ids=lambda target: target.name)
def test_so_it_is_in_each_build_of_the_native_kernels(
    model: Path,
    adapter: Path,
    numbers: str,
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if missing := target.cpu_flags - cpu_flags():
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    monkeypatch.setattr(library, "choose_target", lambda _: target)
    library.native.cache_clear()
    try:
        _check(model, adapter, tmp_path, **FORMATS[numbers])
    finally:
        library.native.cache_clear()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("numbers", FORMATS)
def test_so_it_is_with_a_real_model(demo_model: Path, numbers: str, tmp_path: Path) -> None:
    _check(demo_model, ADAPTERS / "sql", tmp_path, **FORMATS[numbers])


def _check(model: Path, adapter: Path, store: Path, **settings: Any) -> None:
    """Each request alone, at once and with nothing cached, against the same requests together, in
    chunks, on other threads, and again from the cache."""
    alone = _alone(model, adapter, store, **settings)

    for chunks, crowd in CROWDED.items():
        # Torch's float32 products take another order on other threads.
        same_threads = {"num_threads": THREADS} if settings.get("kernels") == "naive" else {}
        engine = _engine(model, store, **settings | crowd | same_threads)
        items = _requests(engine, adapter, "shared")
        together = [_answers(run(engine, items)) for _ in ("cold", "from the cache")]
        one_by_one = [_answer(run_one(engine, item)) for item in items]
        engine.close()
        for index, item in enumerate(items):
            for got in (*together, one_by_one):
                assert got[index] == alone[index], f"request {item.request_id}, chunks of {chunks}"


def _alone(model: Path, adapter: Path, store: Path, **settings: Any) -> list[Answer]:
    """Each prompt at once, with nothing cached and nothing beside it."""
    engine = _engine(model, store, max_num_batched_tokens=2048, num_threads=THREADS, **settings)
    answers = [_answer(run_one(engine, item)) for item in _requests(engine, adapter, None)]
    engine.close()
    return answers


def _engine(model: Path, store: Path, **settings: Any) -> LLMEngine:
    defaults = {"block_size": BLOCK, "kv_cache_memory": 192 << 20, "max_model_len": 1100}
    return make_engine(model, store, **defaults | settings)


def _requests(engine: LLMEngine, adapter: Path, namespace: str | None) -> list[GenerateRequest]:
    """Some of the base model, some of an adapter, some that ask for their prompt's scores."""
    ref = register(engine, adapter).ref
    chooser = random.Random(7)
    prompts = [[chooser.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    return [
        request(
            prompt,
            f"{index}",
            namespace=namespace or str(index),
            adapter=None if index < len(prompts) else ref,
            max_tokens=6,
            temperature=1.0,
            seed=index,
            logprobs=5,
            prompt_logprobs=1 if index % len(prompts) == 2 else None,
        )
        for index, prompt in enumerate(prompts + prompts)
    ]


def _answers(choices: dict[str, list[Choice]]) -> list[Answer]:
    return [_answer(one) for (one,) in choices.values()]


def _answer(choice: Choice) -> Answer:
    return (choice.token_ids, choice.logprobs, choice.prompt_logprobs)
