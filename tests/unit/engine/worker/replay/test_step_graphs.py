"""Which steps are recorded as graphs, and with what padding."""

from collections.abc import Callable

import pytest
import torch
from support.engine.kv import admit, compute, kv_manager, sequence_of
from torch import Tensor

from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.scheduling.step_input import ScheduledSequence, flatten
from loraplex.engine.worker.input_batch import InputBatch
from loraplex.engine.worker.replay.cuda_graphs import CaptureRefused, StepGraph, StepGraphs
from loraplex.engine.worker.replay.step_buffers import StepBuffers, StepSize

LADDER = (1, 2, 4)


class Replay:
    def __init__(self, forward: Callable[[], Tensor]) -> None:
        self.play = forward


class LadderCapture:
    """Pads to a ladder and computes anew at every replay."""

    sizes = LADDER

    def __init__(self, *, refuses_lora: bool = False) -> None:
        self.num_captures = 0
        self._refuses_lora = refuses_lora

    def capture(self, forward: Callable[[], Tensor]) -> StepGraph:
        self.num_captures += 1
        if self._refuses_lora and forward().shape[1] == 2:
            raise CaptureRefused("no adapters here")
        return Replay(forward)


def position_and_slot(batch: InputBatch) -> Tensor:
    """Instead of logits: each row's position and, where there is LoRA, its adapter slot."""
    if batch.hidden_lora is None:
        return batch.positions[:, None]
    return torch.stack((batch.positions, batch.hidden_lora.token_slots.long()), dim=1)


def part(
    kv: KVCacheManager, length: int, slot: int = -1, num_tokens: int = 1, num_choices: int = 1
) -> ScheduledSequence:
    sequence = sequence_of(list(range(3, 3 + length)))
    sequence.adapter_slot = slot
    admit(kv, sequence)
    compute(kv, sequence, length - num_tokens - sequence.num_computed_tokens)
    assert kv.allocate_slots(sequence, num_tokens)
    return ScheduledSequence(sequence, num_tokens, num_choices)


def graphs(kv: KVCacheManager, capture: LadderCapture) -> StepGraphs:
    buffers = StepBuffers(kv, StepSize(8, 8, 8), 2, torch.device("cpu"))
    return StepGraphs(buffers, capture, position_and_slot, num_slots=2)


def replay(recorded: StepGraphs, kv: KVCacheManager, *parts: ScheduledSequence) -> Tensor | None:
    return recorded.run(flatten(parts, kv))


def test_each_size_is_recorded_at_once_with_adapters_and_without() -> None:
    capture = LadderCapture()

    graphs(kv_manager(100), capture)

    assert capture.num_captures == 2 * len(LADDER)


def test_padded_rows_are_cut_off() -> None:
    kv = kv_manager(100)

    logits = replay(graphs(kv, LadderCapture()), kv, part(kv, 7), part(kv, 5, slot=1), part(kv, 9))

    assert logits is not None
    assert logits.tolist() == [[6, -1], [4, 1], [8, -1]]


@pytest.mark.parametrize(
    ("num_tokens", "num_choices"), [(2, 1), (1, 0)], ids=["two tokens", "no logits"]
)
def test_a_step_with_a_part_of_a_prompt_is_not_replayed(num_tokens: int, num_choices: int) -> None:
    kv = kv_manager(100)
    other = part(kv, 6, num_tokens=num_tokens, num_choices=num_choices)

    assert replay(graphs(kv, LadderCapture()), kv, part(kv, 7), other) is None


def test_more_rows_than_are_recorded_are_not_replayed() -> None:
    kv = kv_manager(100)

    assert replay(graphs(kv, LadderCapture()), kv, *(part(kv, 4) for _ in range(5))) is None


def test_what_is_refused_with_adapters_is_asked_once_and_still_replayed_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kv, capture = kv_manager(100), LadderCapture(refuses_lora=True)
    recorded = graphs(kv, capture)

    answers = [replay(recorded, kv, part(kv, 7, slot=slot)) for slot in (1, 0, -1)]

    assert [answer is None for answer in answers] == [True, True, False]
    assert capture.num_captures == len(LADDER) + 1
    assert caplog.messages == ["decode steps with adapters are not recorded: no adapters here"]
