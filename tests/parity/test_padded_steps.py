"""Decode steps padded as for CUDA graphs: the same tokens, and padding touches nothing.

The passes run as they would be recorded, on fixed memory with rows of padding; where there is no
GPU they are not recorded but computed each time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.engines import make_engine, register, request, run
from support.models.adapters import PEFT_NOISE, write_adapter
from support.models.architectures import write_checkpoint

from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.worker.replay.cuda_graphs import StepGraphs
from loraplex.engine.worker.replay.step_buffers import StepBuffers, StepSize

pytestmark = PEFT_NOISE

SIZE = 6  # rows of every recorded step here
PROMPTS = [[5, 6, 7], list(range(10, 31)), [9] * 8, [40, 41]]


@dataclass(frozen=True)
class Computed:
    """A pass that is computed each time it is played."""

    forward: Callable[[], torch.Tensor]

    def play(self) -> torch.Tensor:
        return self.forward()


class PaddedCapture:
    sizes = (SIZE,)

    def __init__(self) -> None:
        self.num_captures = 0

    def capture(self, forward: Callable[[], torch.Tensor]) -> Computed:
        self.num_captures += 1
        return Computed(forward)


def pad_steps(engine: LLMEngine, num_slots: int) -> PaddedCapture:
    """Makes an engine run its decode steps padded to `SIZE` rows."""
    parts, capture = engine._parts, PaddedCapture()
    forward = parts.runner._forward
    size = StepSize(SIZE, SIZE, SIZE)
    buffers = StepBuffers(parts.scheduler.kv, size, num_slots, forward.device)
    with torch.inference_mode():
        parts.runner._recorded = StepGraphs(buffers, capture, forward, num_slots)
    return capture


def answers(engine: LLMEngine, adapters: list[Any]) -> list[list[int]]:
    """Tokens of prompts of several lengths that end at different steps."""
    requests = [
        request(prompt, f"r{i}", adapter=adapter, max_tokens=4 + 3 * i)
        for i, (prompt, adapter) in enumerate(zip(PROMPTS, adapters, strict=True))
    ]
    results = run(engine, requests)
    return [results[item.request_id][0].token_ids for item in requests]


@pytest.mark.parametrize("kernels", ["naive", "auto"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_padding_changes_no_token(architecture: str, kernels: str, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", architecture)
    folders = [
        write_adapter(base, tmp_path / f"a{rank}", rank, r=rank, target_modules="all-linear")
        for rank in (2, 5)
    ]
    results = []
    for padded in (False, True):
        engine = make_engine(base, tmp_path / "store", kernels=kernels, max_adapter_slots=3)
        if padded:
            pad_steps(engine, num_slots=3)
        elif kernels == "naive":
            assert engine._parts.runner._recorded is None
        refs = [register(engine, folder) for folder in folders]
        mixes = [[None] * 4, [refs[0].ref, None, refs[1].ref, None], [refs[1].ref] * 4]
        results.append([answers(engine, mix) for mix in mixes])
        engine.close()

    assert results[0] == results[1]


def test_padding_belongs_to_no_adapter_and_no_sequence(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", "llama")
    engine = make_engine(base, tmp_path / "store", kernels="naive", max_adapter_slots=2)
    pad_steps(engine, num_slots=2)
    folder = write_adapter(base, tmp_path / "a", r=2, target_modules=["q_proj"])
    ref = register(engine, folder).ref
    answers(engine, [ref, None, ref, None])

    batch = engine._parts.runner._recorded._buffers.batch(
        StepSize(SIZE, SIZE, SIZE), lora_capacity=2
    )

    engine.close()
    last = 1  # row: the longest answer ran alone
    assert batch.hidden_lora is not None
    assert batch.attention.spans.seq_lens[last:].tolist() == [0] * (SIZE - last)
    assert batch.attention.slot_mapping[0][last:].tolist() == [-1] * (SIZE - last)
    assert batch.hidden_lora.token_slots[2:].tolist() == [-1] * (SIZE - 2)


def test_steps_are_recorded_once_for_each_size_and_kind(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", "llama")
    engine = make_engine(base, tmp_path / "store", kernels="naive")
    capture = pad_steps(engine, num_slots=2)

    answers(engine, [None] * 4)
    answers(engine, [None] * 4)
    engine.close()

    assert capture.num_captures == 2
