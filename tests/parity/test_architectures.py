"""The engine against plain transformers: same greedy tokens, same log-probabilities, in float32."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.engine.engines import Choice, make_engine, request, run
from support.models.architectures import (
    ARCHITECTURES,
    VOCAB_SIZE,
    WINDOW,
    load_reference,
    write_checkpoint,
)
from transformers import PreTrainedModel

from loraplex.engine.llm_engine import LLMEngine

pytestmark = pytest.mark.device

PROMPT_LENGTHS = (1, 3, 4, 5, WINDOW - 1, WINDOW, WINDOW + 1, 40, 61)  # ragged, block is 4
OUTPUT_LENGTH = 12
TOLERANCE = 2e-4  # of a log-probability, float32


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return load_reference(folder)


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMEngine]:
    engine = make_engine(folder, tmp_path_factory.mktemp("store"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    chooser = random.Random(7)
    return [[chooser.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]


@pytest.fixture(scope="module")
def answers(engine: LLMEngine, prompts: list[list[int]]) -> list[Choice]:
    """All prompts in one ragged batch, in chunks smaller than the longest."""
    requests = [
        request(p, str(i), max_tokens=OUTPUT_LENGTH, logprobs=3, prompt_logprobs=0)
        for i, p in enumerate(prompts)
    ]
    results = run(engine, requests)
    return [results[str(i)][0] for i in range(len(prompts))]


def test_greedy_tokens_are_those_of_transformers(
    reference: PreTrainedModel, prompts: list[list[int]], answers: list[Choice]
) -> None:
    expected = [_generate(reference, prompt) for prompt in prompts]
    assert [answer.token_ids for answer in answers] == expected


def test_logprobs_are_those_of_transformers(
    reference: PreTrainedModel, prompts: list[list[int]], answers: list[Choice]
) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        logprobs = _logprobs(reference, prompt + answer.token_ids)[len(prompt) - 1 : -1]
        top = logprobs.topk(3)
        for position, given in enumerate(answer.logprobs):
            assert [t.token_id for t in given.top] == top.indices[position].tolist()
            values = torch.tensor([t.logprob for t in given.top])
            torch.testing.assert_close(values, top.values[position], atol=TOLERANCE, rtol=0)


def test_prompt_logprobs_are_those_of_transformers(
    reference: PreTrainedModel, prompts: list[list[int]], answers: list[Choice]
) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        logprobs = _logprobs(reference, prompt)
        expected = [float(logprobs[i, token]) for i, token in enumerate(prompt[1:])]
        given = [p.chosen.logprob for p in (answer.prompt_logprobs or [])[1:] if p is not None]
        assert given == pytest.approx(expected, abs=TOLERANCE)


def test_a_cached_prefix_changes_nothing(
    engine: LLMEngine, prompts: list[list[int]], answers: list[Choice]
) -> None:
    again = run(
        engine, [request(p, str(i), max_tokens=OUTPUT_LENGTH) for i, p in enumerate(prompts)]
    )
    longest = len(prompts) - 1
    usage = again[str(longest)][0].usage
    assert usage is not None
    assert usage.cached_tokens == (len(prompts[longest]) - 1) // 4 * 4
    assert [again[str(i)][0].token_ids for i in range(len(prompts))] == [
        answer.token_ids for answer in answers
    ]


@torch.no_grad()
def _generate(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(OUTPUT_LENGTH):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


@torch.no_grad()
def _logprobs(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[T, V]"""
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)
