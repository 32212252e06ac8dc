"""Sharing is exact: adapters behind base prompts and above frontiers, against PEFT in float32."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from support.engine.engines import Choice, make_engine, publish, register, request, run, run_one
from support.models.adapters import PEFT_NOISE, peft_logits, write_adapter
from support.models.architectures import VOCAB_SIZE, load_reference, write_checkpoint
from transformers import DynamicCache

from loraplex.adapters.manifest import Activation
from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import PositionLogprobs

pytestmark = [*PEFT_NOISE, pytest.mark.device]

BLOCK = 4
TOKENS = [(7 * i + 3) % (VOCAB_SIZE - 3) + 3 for i in range(60)]
REST = TOKENS[40:47]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
INVOCATION = [50, 60]
OUTPUT_LENGTH = 9
NUM_LAYERS = 6
TOLERANCE = 1e-4  # of float32 log-probabilities


def slow(value: object) -> Any:
    """A parameter of the slow suite alone."""
    return pytest.param(value, marks=pytest.mark.slow)


ARCHITECTURES = ["gemma3_text", slow("llama")]  # sliding windows, and one kind of layer


@pytest.fixture(scope="module", params=ARCHITECTURES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "base"
    return write_checkpoint(folder, request.param, num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def everywhere(base: Path) -> Path:
    return write_adapter(base, base.parent / "everywhere", r=8, target_modules="all-linear")


@pytest.fixture
def engine(base: Path, tmp_path: Path) -> Iterator[LLMEngine]:
    engine = make_engine(base, tmp_path / "store")
    yield engine
    engine.close()


@pytest.mark.parametrize("length", [BLOCK - 1, slow(BLOCK), slow(BLOCK + 1), 22])
def test_an_adapter_after_the_prompt_is_lora_on_the_keys_and_values_of_the_base(
    engine: LLMEngine, base: Path, everywhere: Path, length: int
) -> None:
    prompt = publish(engine, TOKENS[:length])
    ref = register(engine, everywhere, activation=Activation.AFTER_PROMPT).ref

    answer = run_one(engine, ask(REST, adapter=ref, base_prompt=prompt))

    assert answer.usage is not None
    assert answer.usage.cached_tokens == length
    assert_equal(answer, base_then_lora(base, everywhere, TOKENS[:length], REST, answer))


def test_behind_the_prompt_embeddings_and_lm_head_are_adapted_too(
    engine: LLMEngine, base: Path, tmp_path: Path
) -> None:
    targets = ["embed_tokens", "k_proj", "lm_head"]
    folder = write_adapter(base, tmp_path / "ends", r=8, target_modules=targets)
    prompt = publish(engine, TOKENS[:22])
    ref = register(engine, folder, activation=Activation.AFTER_PROMPT).ref

    answer = run_one(engine, ask(REST, adapter=ref, base_prompt=prompt))

    assert_equal(answer, base_then_lora(base, folder, TOKENS[:22], REST, answer))


def test_of_nothing_but_the_prompt_the_first_token_is_the_base_models(
    engine: LLMEngine, base: Path, everywhere: Path
) -> None:
    prompt = publish(engine, TOKENS[:22])
    ref = register(engine, everywhere, activation=Activation.AFTER_PROMPT).ref

    answer = run_one(engine, ask([], adapter=ref, base_prompt=prompt))
    plain = run_one(engine, ask([], base_prompt=prompt))

    assert answer.token_ids[0] == plain.token_ids[0]
    assert answer.token_ids[1:] != plain.token_ids[1:]
    first = Choice(token_ids=answer.token_ids[:1])
    rest = Choice(token_ids=answer.token_ids[1:], logprobs=answer.logprobs[1:])
    assert_equal(rest, base_then_lora(base, everywhere, TOKENS[:22], first.token_ids, rest))


def test_without_a_base_prompt_it_acts_from_the_first_token(
    engine: LLMEngine, base: Path, everywhere: Path
) -> None:
    ref = register(engine, everywhere, activation=Activation.AFTER_PROMPT).ref

    answer = run_one(engine, ask(REST, adapter=ref))

    assert_equal(answer, base_then_lora(base, everywhere, [], REST, answer))


def test_a_base_prompt_that_the_tokens_begin_with_counts_and_so_does_an_adapters_own(
    engine: LLMEngine, everywhere: Path
) -> None:
    prompt = publish(engine, TOKENS[:22])
    mode = Activation.AFTER_PROMPT
    plain = register(engine, everywhere, activation=mode).ref
    bound = register(
        engine, everywhere, activation=mode, adapter_id="bound", base_prompt=prompt
    ).ref

    answers = run(
        engine,
        [
            ask(REST, "named", namespace="1", adapter=plain, base_prompt=prompt),
            ask([*TOKENS[:22], *REST], "begun", namespace="2", adapter=plain),
            ask(REST, "bound", namespace="3", adapter=bound),
            ask([*TOKENS[:22], *REST], "bound and begun", namespace="4", adapter=bound),
        ],
    )

    assert len({tuple(choices[0].token_ids) for choices in answers.values()}) == 1
    assert all(choices[0].usage.cached_tokens == 22 for choices in answers.values())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "before",
    [
        pytest.param([], id="at the beginning"),
        *(TOKENS[:start] for start in (15, 16, 17)),
        pytest.param(TOKENS[:21], id="over the end of a chunk"),
        pytest.param([*INVOCATION, *TOKENS[:11], *INVOCATION, *TOKENS[11:13]], id="several times"),
    ],
)
@pytest.mark.parametrize("chunk", [11, slow(64)])
def test_an_activated_adapter_is_peft_wherever_its_point_lies_in_block_and_chunk(
    base: Path, tmp_path: Path, before: list[int], chunk: int
) -> None:
    config = {"target_modules": "all-linear", "alora_invocation_tokens": INVOCATION}
    folder = write_adapter(base, tmp_path / "activated", r=8, **config)
    prompt = [*before, *INVOCATION, *REST]
    engine = make_engine(base, tmp_path / "store", max_num_batched_tokens=chunk)
    ref = register(engine, folder).ref
    run_one(engine, ask(prompt))

    first, *others = run(engine, [ask(prompt, adapter=ref, n=3, temperature=1.0, seed=4, top_k=1)])[
        "r"
    ]
    whole = run_one(engine, ask(prompt, adapter=ref, prompt_logprobs=1))
    engine.close()

    assert first.usage is not None
    assert first.usage.cached_tokens == len(before) // BLOCK * BLOCK
    logits = peft_logits(base, folder, torch.tensor([[*prompt, *first.token_ids]]))[0]
    assert_equal(first, logits)
    assert all(other.token_ids == first.token_ids for other in others)
    assert_equal(whole, logits)
    expected = logits.log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]
    assert_close(chosen(whole.prompt_logprobs), expected.tolist())


@pytest.mark.parametrize(
    ("config", "frontier"),
    [
        ({"target_modules": ["k_proj"], "layers_to_transform": [3]}, 3),
        ({"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [3]}, 4),
        ({"target_modules": LINEARS, "layers_to_transform": [1, 5]}, 1),
        ({"target_modules": ["up_proj"], "layers_to_transform": [5]}, 6),
        ({"target_modules": ["lm_head"]}, 2**31),
        ({"target_modules": ["embed_tokens"]}, 0),
    ],
)
@pytest.mark.parametrize("first", ["base", slow("adapter")])
def test_layers_below_the_frontier_are_shared_and_the_output_stays(
    base: Path, tmp_path: Path, config: dict[str, Any], frontier: int, first: str
) -> None:
    folder = write_adapter(base, tmp_path / "adapter", r=8, lora_alpha=32, **config)
    engine = make_engine(base, tmp_path / "store", kv_group_size=1)
    info = register(engine, folder)
    order = [info.ref, None] if first == "adapter" else [None, info.ref]

    answers = {ref: run_one(engine, ask(TOKENS[:30], adapter=ref)) for ref in order}
    engine.close()

    assert info.frontier == frontier
    second, adapted, plain = answers[order[1]], answers[info.ref], answers[None]
    assert second.usage is not None
    assert second.usage.cached_tokens == (28 if frontier >= NUM_LAYERS else 0)
    assert_equal(adapted, base_then_lora(base, folder, [], TOKENS[:30], adapted))
    assert_equal(plain, base_then_lora(base, folder, TOKENS[:30], [], plain))


def test_adapters_above_a_frontier_take_memory_for_the_layers_above_alone(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", "llama", num_hidden_layers=NUM_LAYERS)
    config = {"target_modules": LINEARS, "layers_to_transform": [4, 5]}
    folders = [write_adapter(base, tmp_path / str(i), i, r=4, **config) for i in range(3)]

    layers_held = []
    for size in (1, NUM_LAYERS):
        engine = make_engine(base, tmp_path / "store", kv_group_size=size)
        refs = [register(engine, folder).ref for folder in folders]
        run(engine, [ask(REST, f"load {i}", adapter=ref) for i, ref in enumerate(refs)])
        for i, ref in enumerate([None, *refs]):
            engine.add(ask(TOKENS[:30], f"r{i}", adapter=ref, max_tokens=60))
            engine.step()  # who begins in one step shares nothing yet
        for _ in range(10):
            engine.step()
        stats = engine.stats()
        layers_held.append(size * (stats.num_blocks - stats.num_free_blocks))
        engine.close()

    assert layers_held[1] - layers_held[0] == 3 * 7 * 4  # adapters, whole blocks, layers below


def test_an_invocation_that_is_generated_activates_nothing(base: Path, tmp_path: Path) -> None:
    engine = make_engine(base, tmp_path / "store")
    plain = run_one(engine, ask(TOKENS[:18]))
    config = {"target_modules": "all-linear", "alora_invocation_tokens": plain.token_ids[:2]}
    ref = register(engine, write_adapter(base, tmp_path / "activated", r=8, **config)).ref

    answer = run_one(engine, ask(TOKENS[:18], adapter=ref))
    told = [*TOKENS[:18], *answer.token_ids]
    turns = [run_one(engine, ask(told, adapter=name)) for name in (ref, None)]
    engine.close()

    assert answer.token_ids == plain.token_ids
    assert turns[0].token_ids != turns[1].token_ids


def test_adapters_of_all_modes_share_steps_and_prompts_exactly(base: Path, tmp_path: Path) -> None:
    activated = {"target_modules": "all-linear", "alora_invocation_tokens": INVOCATION}
    upper = {"target_modules": LINEARS, "layers_to_transform": [4, 5]}
    folders = {
        "always": write_adapter(base, tmp_path / "always", 1, target_modules="all-linear"),
        "invocation": write_adapter(base, tmp_path / "invocation", 2, **activated),
        "upper": write_adapter(base, tmp_path / "upper", 3, **upper),
    }
    tokens = [*TOKENS[:22], *INVOCATION, *REST]
    engine = make_engine(base, tmp_path / "store", kv_group_size=1, max_num_batched_tokens=19)
    prompt = publish(engine, TOKENS[:22])
    refs = {name: register(engine, folder).ref for name, folder in folders.items()}
    refs["after"] = register(
        engine, folders["always"], adapter_id="after", activation=Activation.AFTER_PROMPT
    ).ref
    requests = [
        ask(tokens, f"{name} {space}", namespace=space, adapter=ref, max_tokens=9)
        for space in "xy"
        for name, ref in {"base": None, **refs}.items()
    ]

    together = run(engine, requests)
    engine.close()

    points = {"base": len(tokens), "after": 22}
    folders |= {"base": folders["always"], "after": folders["always"]}
    for request_id, (answer,) in together.items():
        name = request_id.split()[0]
        point = points.get(name, 0)
        before, behind = tokens[:point], tokens[point:]
        expected = (
            peft_logits(base, folders[name], torch.tensor([[*tokens, *answer.token_ids]]))[0]
            if name == "invocation"
            else base_then_lora(base, folders[name], before, behind, answer)
        )
        assert_equal(answer, expected)
    shared = {
        request_id: answer.usage.cached_tokens
        for request_id, (answer,) in together.items()
        if answer.usage
    }
    assert prompt.version == 1
    assert {shared[f"{name} x"] for name in ("base", "invocation", "after")} == {22}
    assert {shared[f"{name} x"] for name in ("always", "upper")} == {0}


def ask(prompt: list[int], request_id: str = "r", **options: Any) -> Any:
    return request(prompt, request_id, **{"max_tokens": OUTPUT_LENGTH, "logprobs": 1} | options)


def chosen(logprobs: list[PositionLogprobs | None] | None) -> list[float]:
    assert logprobs is not None
    return [item.chosen.logprob for item in logprobs if item is not None]


def assert_close(found: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(expected), atol=TOLERANCE, rtol=TOLERANCE
    )


def assert_equal(answer: Choice, logits: torch.Tensor) -> None:
    """The answer is what these logits [T, V] of its prompt and of itself are greedy for."""
    expected = logits[-len(answer.token_ids) - 1 : -1].log_softmax(-1).max(-1)
    assert answer.token_ids == expected.indices.tolist()
    assert_close(chosen(list(answer.logprobs)), expected.values.tolist())


@torch.no_grad()
def base_then_lora(
    base: Path, folder: Path, before: list[int], behind: list[int], answer: Choice
) -> torch.Tensor:
    """[T, V] logits: the base model's keys and values of `before`, then PEFT's LoRA on everything
    behind, the answer included. Without anything behind, the base model alone."""
    model: Any = PeftModel.from_pretrained(load_reference(base), folder).eval()
    model = model.base_model.model
    cache = DynamicCache(config=model.config)
    parts = []
    for tokens, is_on in ((before, False), ([*behind, *answer.token_ids], bool(behind))):
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                module.enable_adapters(is_on)
        if tokens:
            ids = torch.tensor([tokens])
            parts.append(model(input_ids=ids, cache=cache, use_cache=True).logits[0])
    return torch.cat(parts)
