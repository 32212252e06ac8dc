"""Steps from tapes against the same steps computed as they come, to the bit."""

import random
from pathlib import Path

import pytest
import torch
from support.engine.engines import Choice, drain, make_engine, register, request, run
from support.kernels.captures import check_steps
from support.models.adapters import PEFT_NOISE, write_adapter
from support.models.architectures import ARCHITECTURES, VOCAB_SIZE, WINDOW, write_checkpoint

from loraplex.adapters.manifest import AdapterRef
from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import UnregisterAdapter

pytestmark = [*PEFT_NOISE, pytest.mark.usefixtures("native_kernels")]

LENGTHS = {"a": 1, "b": 5, "c": WINDOW + 1, "d": 33}  # of the prompts, by name
NUM_TOKENS = {"a": 9, "b": 4, "c": 6, "d": 2}  # so that the rows become fewer one by one


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("gemma"), "gemma3_text")


@pytest.fixture(scope="module")
def adapters(gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(gemma, folder / "wide", 1, r=16, target_modules="all-linear"),
        write_adapter(gemma, folder / "narrow", 2, r=3, target_modules=["q_proj", "down_proj"]),
        write_adapter(gemma, folder / "ends", 3, r=5, target_modules=["embed_tokens", "lm_head"]),
    ]


def tokens(choices: list[Choice]) -> list[list[int]]:
    return [choice.token_ids for choice in choices]


def ask(engine: LLMEngine, refs: dict[str, AdapterRef] | None = None) -> list[Choice]:
    """Answers to all prompts at once, each through the adapter that is given for it."""
    chooser = random.Random(3)
    requests = [
        request(
            [chooser.randrange(3, VOCAB_SIZE) for _ in range(length)],
            name,
            adapter=(refs or {}).get(name),
            max_tokens=NUM_TOKENS[name],
        )
        for name, length in LENGTHS.items()
    ]
    results = run(engine, requests)
    return [results[name][0] for name in LENGTHS]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_is_recorded_and_its_tapes_give_the_same_logits(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = check_steps(monkeypatch)
    engine = make_engine(
        write_checkpoint(tmp_path / "model", architecture), tmp_path, dtype="bfloat16"
    )
    ask(engine)
    engine.close()

    assert log.is_clean


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_tape_follows_adapters_that_come_and_go(
    gemma: Path,
    adapters: list[Path],
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = check_steps(monkeypatch)
    engine = make_engine(gemma, tmp_path, dtype=dtype, max_adapter_slots=2)
    stories = _stories(engine, adapters)
    engine.close()

    assert len({str(story) for story in stories}) == len(stories)  # adapters changed something
    assert log.is_clean


def _stories(engine: LLMEngine, folders: list[Path]) -> list[list[list[int]]]:
    """Base rows, then mixed ones, then the same rows on other adapters in the same two slots."""
    stories = [tokens(ask(engine))]
    wide, narrow = (register(engine, folder).ref for folder in folders[:2])
    stories.append(tokens(ask(engine, {"a": wide, "b": narrow, "d": wide})))
    engine.submit(UnregisterAdapter(request_id="u", adapter=wide))
    drain(engine)
    ends = register(engine, folders[2]).ref
    stories.append(tokens(ask(engine, {"a": ends, "b": narrow, "d": ends})))
    stories.append(tokens(ask(engine, {"a": ends, "c": narrow})))
    return stories


FORMATS: dict[str, dict[str, str]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}
INVOCATION = [40, 41]


@pytest.fixture(scope="module")
def late(gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that acts from its invocation on."""
    return write_adapter(
        gemma,
        tmp_path_factory.mktemp("late") / "late",
        4,
        r=4,
        target_modules=["k_proj", "up_proj"],
        alora_invocation_tokens=INVOCATION,
    )


@pytest.mark.parametrize("numbers", FORMATS.values(), ids=FORMATS)
def test_prompts_and_decodes_in_any_mixture_are_played(
    gemma: Path,
    adapters: list[Path],
    late: Path,
    numbers: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts longer than a step, that begin alike, fork, and come while others are answered."""
    log = check_steps(monkeypatch)
    engine = make_engine(gemma, tmp_path, **numbers)
    refs = [None, *(register(engine, folder).ref for folder in (*adapters[:2], late))]
    chooser = random.Random(5)
    begin = [chooser.randrange(3, VOCAB_SIZE) for _ in range(20)]
    for index in range(24):
        own = [chooser.randrange(3, VOCAB_SIZE) for _ in range(chooser.randrange(1, 60))]
        at = chooser.randrange(len(own))
        prompt = begin[: chooser.choice((0, 20))] + own[:at] + INVOCATION + own[at:]
        engine.add(
            request(
                prompt,
                f"r{index}",
                adapter=chooser.choice(refs),
                n=chooser.choice((1, 1, 3)),
                max_tokens=chooser.randrange(1, 9),
                temperature=1.0,
                seed=index,
            )
        )
        for _ in range(chooser.randrange(4)):
            engine.step()
    drain(engine)
    engine.close()

    assert log.is_clean
    assert len(log.are_equal) > 20


def test_recording_leaves_the_cache_as_it_is(gemma: Path, tmp_path: Path) -> None:
    engine = make_engine(gemma, tmp_path)
    tokens(ask(engine))
    rows = engine._parts.runner._cache.storage.rows
    before = [row.clone() for row in rows]
    engine._parts.runner._recorded._tapes.clear()

    while engine.prepare():
        pass

    engine.close()
    assert all(torch.equal(row, old) for row, old in zip(rows, before, strict=True))
