"""The engine on Triton kernels against the engine on plain torch, a few tokens long."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.engines import Choice, make_engine, register, request, run
from support.models.adapters import PEFT_NOISE, write_adapter
from support.models.architectures import VOCAB_SIZE, write_checkpoint

pytestmark = [*PEFT_NOISE, pytest.mark.device]

PROMPTS = [[(7 * i + 3) % (VOCAB_SIZE - 3) + 3 for i in range(length)] for length in (2, 15, 17)]
ADAPTERS: list[dict[str, Any]] = [
    {"r": 3, "lora_alpha": 9, "target_modules": "all-linear"},
    {"r": 4, "lora_alpha": 40, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
]


def answers(model: Path, store: Path, adapters: list[Path], kernels: str) -> list[Choice]:
    """Of the base model and of each adapter, in one batch."""
    engine = make_engine(model, store, kernels=kernels)
    try:
        refs = [None, *(register(engine, folder).ref for folder in adapters)]
        requests = [
            request(prompt, str(i), adapter=ref, max_tokens=2, prompt_logprobs=0)
            for i, (prompt, ref) in enumerate(zip(PROMPTS, refs, strict=False))
        ]
        results = run(engine, requests)
    finally:
        engine.close()
    return [results[str(i)][0] for i in range(len(requests))]


def logprobs(choices: list[Choice]) -> torch.Tensor:
    return torch.tensor(
        [p.chosen.logprob for c in choices for p in c.prompt_logprobs or [] if p is not None]
    )


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss"])
def test_base_and_adapters_answer_as_on_plain_torch(architecture: str, tmp_path: Path) -> None:
    model = write_checkpoint(
        tmp_path / "model", architecture, num_hidden_layers=2, layer_types=None
    )
    adapters = [
        write_adapter(model, tmp_path / f"adapter-{seed}", seed, **config)
        for seed, config in enumerate(ADAPTERS)
    ]

    plain = answers(model, tmp_path / "store", adapters, "naive")
    triton = answers(model, tmp_path / "store", adapters, "triton")

    assert [c.token_ids for c in triton] == [c.token_ids for c in plain]
    torch.testing.assert_close(logprobs(triton), logprobs(plain), atol=2e-4, rtol=0)
