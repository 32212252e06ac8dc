"""The engine on native kernels against the engine on plain torch, for every architecture."""

import random
from pathlib import Path

import pytest
import torch
from support.engine.engines import Choice, make_engine, request, run
from support.models.architectures import ARCHITECTURES, VOCAB_SIZE, WINDOW, write_checkpoint

pytestmark = pytest.mark.usefixtures("native_kernels")


LENGTHS = (1, 4, 5, WINDOW + 1, 33, 61)
# Mean absolute error of log-probabilities in bfloat16: random weights amplify each rounding.
BFLOAT16_ERROR = 0.2


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    chooser = random.Random(11)
    return [[chooser.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def answers(folder: Path, store: Path, prompts: list[list[int]], **settings: str) -> list[Choice]:
    engine = make_engine(folder, store, **settings)
    try:
        requests = [
            request(p, str(i), max_tokens=6, prompt_logprobs=0) for i, p in enumerate(prompts)
        ]
        results = run(engine, requests)
    finally:
        engine.close()
    return [results[str(i)][0] for i in range(len(prompts))]


def logprobs(choices: list[Choice]) -> torch.Tensor:
    """Of the prompts' tokens, which all engines are given alike."""
    return torch.tensor(
        [p.chosen.logprob for c in choices for p in c.prompt_logprobs or [] if p is not None]
    )


def test_float32_gives_the_same_tokens_and_logprobs(
    folder: Path, tmp_path: Path, prompts: list[list[int]]
) -> None:
    plain = answers(folder, tmp_path, prompts, kernels="naive")
    fast = answers(folder, tmp_path, prompts, kernels="auto")

    assert [c.token_ids for c in fast] == [c.token_ids for c in plain]
    torch.testing.assert_close(logprobs(fast), logprobs(plain), atol=2e-4, rtol=0)


def test_bfloat16_is_as_near_to_float32_as_plain_torch_is(
    folder: Path, tmp_path: Path, prompts: list[list[int]]
) -> None:
    exact = logprobs(answers(folder, tmp_path, prompts, kernels="naive"))
    plain, fast = (
        logprobs(answers(folder, tmp_path, prompts, kernels=kernels, dtype="bfloat16"))
        for kernels in ("naive", "auto")
    )

    error, plain_error = ((given - exact).abs().mean() for given in (fast, plain))
    assert error < max(1.5 * float(plain_error), BFLOAT16_ERROR / 4)
    assert error < BFLOAT16_ERROR
