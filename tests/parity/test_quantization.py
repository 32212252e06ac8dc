"""The engine with eight-bit linears against the engine without."""

from pathlib import Path

import pytest
import torch
from support.engine.engines import make_engine, request, run_one
from support.models.architectures import VOCAB_SIZE, write_checkpoint

from loraplex.engine.errors import ConfigRefused

PROMPT = [(7 * i + 3) % VOCAB_SIZE for i in range(40)]
ERROR = 0.1  # mean, of log-probabilities; random weights amplify each rounding


def logprobs(folder: Path, store: Path, **settings: str) -> torch.Tensor:
    engine = make_engine(folder, store, dtype="bfloat16", **settings)
    try:
        choice = run_one(engine, request(PROMPT, max_tokens=4, prompt_logprobs=0))
    finally:
        engine.close()
    return torch.tensor([p.chosen.logprob for p in choice.prompt_logprobs or [] if p is not None])


@pytest.mark.parametrize("kernels", ["auto", "naive"])
@pytest.mark.parametrize("architecture", ["gemma3_text", "llama"])
def test_eight_bits_come_near_to_bfloat16(architecture: str, kernels: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", architecture)

    plain = logprobs(folder, tmp_path, kernels=kernels)
    rounded = logprobs(folder, tmp_path, kernels=kernels, quantization="int8")

    assert not torch.equal(rounded, plain)
    assert float((rounded - plain).abs().mean()) < ERROR


def test_another_number_format_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llama")

    with pytest.raises(ConfigRefused, match="int8 needs a model in bfloat16 on a CPU"):
        make_engine(folder, tmp_path, dtype="float32", quantization="int8")
