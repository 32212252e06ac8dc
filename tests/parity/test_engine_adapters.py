"""Adapters through the whole engine, against PEFT: batches, slots, prefix cache, activation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from support.engine.engines import drain, make_engine, register, request, run, run_one, try_register
from support.models.adapters import PEFT_NOISE, write_adapter
from support.models.architectures import VOCAB_SIZE, load_reference, write_checkpoint

from loraplex.adapters.manifest import AdapterRef
from loraplex.engine.errors import RequestRejected
from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import (
    AdapterUnregistered,
    FailureCode,
    RequestFailed,
    TokenEvent,
    UnregisterAdapter,
)

pytestmark = [*PEFT_NOISE, pytest.mark.device]

PROMPT = [(7 * i + 3) % (VOCAB_SIZE - 3) + 3 for i in range(37)]  # no multiple of the block
INVOCATION = [50, 60]
ACTIVATED_PROMPT = [*PROMPT[:17], *INVOCATION, 70]
OUTPUT_LENGTH = 10
ADAPTERS: dict[str, dict[str, Any]] = {
    "wide": {"r": 16, "lora_alpha": 16, "use_rslora": True, "target_modules": "all-linear"},
    "narrow": {"r": 3, "lora_alpha": 9, "target_modules": ["q_proj", "down_proj"]},
    "upper": {"r": 8, "target_modules": ["v_proj", "up_proj"], "layers_to_transform": [2, 3]},
    "head": {"r": 4, "lora_alpha": 40, "target_modules": ["embed_tokens", "lm_head"]},
    "single": {"r": 1, "lora_alpha": 4, "target_modules": ["o_proj", "gate_proj"]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"), "gemma3_text")


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(base, parent / name, seed, **config)
        for seed, (name, config) in enumerate(ADAPTERS.items())
    }


@pytest.fixture(scope="module")
def expected(base: Path, folders: dict[str, Path]) -> dict[str, list[int]]:
    """What PEFT answers through each adapter, and the base model without any."""
    model = PeftModel.from_pretrained(load_reference(base), folders["wide"], adapter_name="wide")
    for name in list(ADAPTERS)[1:]:
        model.load_adapter(folders[name], adapter_name=name)
    answers = {}
    for name in ADAPTERS:
        model.set_adapter(name)
        answers[name] = _greedy(model, PROMPT)
    with model.disable_adapter():
        answers["base"] = _greedy(model, PROMPT)
    return answers


@pytest.fixture
def engine(base: Path, tmp_path: Path) -> Iterator[LLMEngine]:
    engine = make_engine(base, tmp_path / "store")
    yield engine
    engine.close()


def test_one_batch_of_base_and_adapters_of_all_ranks_equals_peft(
    engine: LLMEngine, folders: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    refs = _register(engine, folders)
    answers = run(engine, [_ask(name, refs) for name in ["base", *ADAPTERS, "base2"]])
    given = {name: choices[0].token_ids for name, choices in answers.items()}
    assert given == {**expected, "base2": expected["base"]}


def test_every_adapter_changes_the_output(expected: dict[str, list[int]]) -> None:
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)


def test_more_adapters_than_slots_are_all_served(
    base: Path, folders: dict[str, Path], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    engine = make_engine(base, tmp_path / "store", max_adapter_slots=2, adapter_wait=0.0)
    refs = _register(engine, folders)
    names = [*ADAPTERS, "base", *ADAPTERS]
    requests = [_ask(name, refs, f"{i}:{name}") for i, name in enumerate(names)]
    answers = run(engine, requests)
    stats = engine.stats()
    engine.close()
    assert {id_: choices[0].token_ids for id_, choices in answers.items()} == {
        f"{i}:{name}": expected[name] for i, name in enumerate(names)
    }
    assert stats.adapters.evictions > 0
    assert stats.adapters.references == 0


def test_a_prefix_is_reused_by_the_same_adapter_only(
    engine: LLMEngine, folders: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    refs = _register(engine, folders)
    order = ["base", "wide", "narrow", "base", "wide", "narrow"]
    answers = [run_one(engine, _ask(name, refs)) for name in order]
    assert [a.token_ids for a in answers] == [expected[name] for name in order]
    assert [a.usage and a.usage.cached_tokens for a in answers] == [0, 0, 0, 36, 36, 36]


def test_another_namespace_never_hits(engine: LLMEngine) -> None:
    first = run_one(engine, request(PROMPT, namespace="org_12345"))
    other = run_one(engine, request(PROMPT, namespace="org_1"))
    assert other.usage is not None
    assert other.usage.cached_tokens == 0
    assert other.token_ids == first.token_ids


def test_new_content_under_an_old_id_does_not_see_the_old_blocks(
    engine: LLMEngine, base: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    old = register(engine, folders["wide"]).ref
    run_one(engine, request(PROMPT, adapter=old))
    replaced = write_adapter(base, tmp_path / "v2" / "wide", seed=9, **ADAPTERS["wide"])
    new = register(engine, replaced).ref
    answer = run_one(engine, request(PROMPT, adapter=new, max_tokens=OUTPUT_LENGTH))
    assert old.adapter_id == new.adapter_id
    assert answer.usage is not None
    assert answer.usage.cached_tokens == 0
    assert answer.token_ids == _peft_greedy(base, replaced, PROMPT)


def test_an_activated_adapter_equals_peft_and_leaves_the_prefix_to_the_base(
    engine: LLMEngine, base: Path, tmp_path: Path
) -> None:
    config = {"target_modules": "all-linear", "alora_invocation_tokens": INVOCATION}
    folder = write_adapter(base, tmp_path / "activated", r=8, **config)
    ref = register(engine, folder).ref
    plain = run_one(engine, request(ACTIVATED_PROMPT, max_tokens=OUTPUT_LENGTH))
    activated = run_one(engine, request(ACTIVATED_PROMPT, adapter=ref, max_tokens=OUTPUT_LENGTH))
    assert activated.token_ids == _alora_greedy(base, folder, ACTIVATED_PROMPT)
    assert activated.token_ids != plain.token_ids
    assert activated.usage is not None
    assert activated.usage.cached_tokens == 16  # the whole blocks before the invocation


def test_the_base_reuses_what_an_activated_adapter_computed_before_its_point(
    engine: LLMEngine, base: Path, tmp_path: Path
) -> None:
    config = {"target_modules": "all-linear", "alora_invocation_tokens": INVOCATION}
    ref = register(engine, write_adapter(base, tmp_path / "activated", r=8, **config)).ref
    run_one(engine, request(ACTIVATED_PROMPT, adapter=ref))
    plain = run_one(engine, request(ACTIVATED_PROMPT))
    assert plain.usage is not None
    assert plain.usage.cached_tokens == 16


def test_without_its_invocation_an_activated_adapter_is_the_base(
    engine: LLMEngine, base: Path, tmp_path: Path
) -> None:
    config = {"target_modules": "all-linear", "alora_invocation_tokens": [9, 9, 9]}
    ref = register(engine, write_adapter(base, tmp_path / "activated", r=8, **config)).ref
    plain = run_one(engine, request(PROMPT))
    activated = run_one(engine, request(PROMPT, adapter=ref))
    assert activated.token_ids == plain.token_ids


def test_an_adapter_in_use_is_unregistered_when_its_last_sequence_has_ended(
    engine: LLMEngine, folders: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    ref = register(engine, folders["wide"]).ref
    engine.add(request(PROMPT, "running", adapter=ref, n=3, max_tokens=OUTPUT_LENGTH))
    engine.submit(UnregisterAdapter(request_id="bye", adapter=ref))
    with pytest.raises(RequestRejected) as refusal:
        engine.add(request(PROMPT, "late", adapter=ref))
    *tokens, last = drain(engine)
    assert refusal.value.code is FailureCode.ADAPTER_NOT_FOUND
    assert last == AdapterUnregistered("bye")
    assert _tokens_of(tokens, index=2) == expected["wide"]
    assert engine.stats().adapters.resident == 0


def test_a_stored_copy_outlives_its_source(
    base: Path, folders: dict[str, Path], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    source = tmp_path / "moved"
    source.mkdir()
    for file in folders["narrow"].iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    engine = make_engine(base, tmp_path / "store", max_adapter_slots=1)
    refs = _register(engine, {"narrow": source, "wide": folders["wide"]})
    for file in source.iterdir():
        file.unlink()
    answers = [run_one(engine, _ask(name, refs)) for name in ("wide", "narrow")]
    engine.close()
    assert [a.token_ids for a in answers] == [expected["wide"], expected["narrow"]]


def test_a_broken_adapter_is_refused_and_the_engine_goes_on(
    engine: LLMEngine, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    outcome = try_register(engine, tmp_path)
    answer = run_one(engine, request(PROMPT, max_tokens=OUTPUT_LENGTH))
    assert isinstance(outcome, RequestFailed)
    assert outcome.code is FailureCode.ADAPTER_REJECTED
    assert str(tmp_path) not in outcome.message
    assert answer.token_ids == expected["base"]


def _register(engine: LLMEngine, folders: dict[str, Path]) -> dict[str, AdapterRef]:
    return {name: register(engine, folder).ref for name, folder in folders.items()}


def _ask(name: str, refs: dict[str, AdapterRef], request_id: str = "") -> Any:
    return request(PROMPT, request_id or name, adapter=refs.get(name), max_tokens=OUTPUT_LENGTH)


def _tokens_of(events: list[Any], index: int) -> list[int]:
    return [
        token
        for event in events
        if isinstance(event, TokenEvent) and event.index == index
        for token in event.token_ids
    ]


def _peft_greedy(base: Path, folder: Path, prompt: list[int]) -> list[int]:
    return _greedy(PeftModel.from_pretrained(load_reference(base), folder), prompt)


def _alora_greedy(base: Path, folder: Path, prompt: list[int]) -> list[int]:
    model = PeftModel.from_pretrained(load_reference(base), folder)
    model.eval()
    output = model.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=OUTPUT_LENGTH,
        min_new_tokens=OUTPUT_LENGTH,
        do_sample=False,
        pad_token_id=2,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@torch.no_grad()
def _greedy(model: Any, prompt: list[int]) -> list[int]:
    """Token by token without a cache: slow and plain."""
    model.eval()
    ids = torch.tensor([prompt])
    for _ in range(OUTPUT_LENGTH):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    tokens: list[int] = ids[0, len(prompt) :].tolist()
    return tokens
