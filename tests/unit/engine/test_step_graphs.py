"""Which steps are recorded and when."""

from collections.abc import Callable

import pytest
import torch
from support.kv import admit, compute, kv_manager, sequence_of
from torch import Tensor

from loraplex.engine.input_batch import InputBatch
from loraplex.engine.kv_cache_manager import KVCacheManager
from loraplex.engine.scheduler import ScheduledSequence
from loraplex.engine.step_buffers import StepBuffers
from loraplex.engine.step_graphs import CaptureRefused, StepGraph, StepGraphs

LADDER = (1, 2, 4)


class Replay:
    def __init__(self, forward: Callable[[], Tensor]) -> None:
        self.play = forward


class LadderCapture:
    """Pads to a ladder and computes anew at every replay."""

    def __init__(self, *, refuses_lora: bool = False) -> None:
        self.num_captures = 0
        self._refuses_lora = refuses_lora

    def padded(self, num_rows: int) -> int | None:
        return next((size for size in LADDER if size >= num_rows), None)

    def capture(self, forward: Callable[[], Tensor]) -> StepGraph:
        self.num_captures += 1
        if self._refuses_lora and bool(forward()[0, 1] >= 0):
            raise CaptureRefused("no adapters here")
        return Replay(forward)


def position_and_slot(batch: InputBatch) -> Tensor:
    """Instead of logits: each row's position and adapter slot."""
    slots = torch.full_like(batch.positions, -1)
    if batch.hidden_lora is not None:
        slots = batch.hidden_lora.token_slots.long()
    return torch.stack((batch.positions, slots), dim=1)


def step(
    kv: KVCacheManager, length: int, slot: int = -1, num_tokens: int = 1, num_samples: int = 1
) -> ScheduledSequence:
    sequence = sequence_of(list(range(3, 3 + length)))
    sequence.adapter_slot = slot
    admit(kv, sequence)
    compute(kv, sequence, length - num_tokens - sequence.num_computed_tokens)
    assert kv.allocate_slots(sequence, num_tokens)
    return ScheduledSequence(sequence, num_tokens, num_samples)


def graphs(kv: KVCacheManager, capture: LadderCapture) -> StepGraphs:
    return StepGraphs(StepBuffers(kv, 8, 2, torch.device("cpu")), capture, position_and_slot)


def replay(recorded: StepGraphs, steps: list[ScheduledSequence]) -> Tensor | None:
    """What comes when the size has come before."""
    recorded.run(steps)
    return recorded.run(steps)


def test_a_size_is_recorded_when_it_comes_again() -> None:
    kv, capture = kv_manager(100), LadderCapture()
    recorded = graphs(kv, capture)

    first, again = (recorded.run([step(kv, 7)]) for _ in range(2))

    assert first is None
    assert again is not None


def test_each_size_is_recorded_once_with_adapters_and_once_without() -> None:
    kv, capture = kv_manager(100), LadderCapture()
    recorded = graphs(kv, capture)
    for _ in range(3):
        recorded.run([step(kv, 7)])
        recorded.run([step(kv, 7, slot=1)])
        recorded.run([step(kv, 7), step(kv, 8), step(kv, 9)])

    assert capture.num_captures == 3


def test_padded_rows_are_cut_off() -> None:
    kv = kv_manager(100)
    steps = [step(kv, 7), step(kv, 5, slot=1), step(kv, 9)]

    logits = replay(graphs(kv, LadderCapture()), steps)

    assert logits is not None
    assert logits.tolist() == [[6, -1], [4, 1], [8, -1]]


@pytest.mark.parametrize(
    ("num_tokens", "num_samples"), [(2, 1), (1, 0)], ids=["two tokens", "no logits"]
)
def test_a_step_with_a_part_of_a_prompt_is_not_replayed(num_tokens: int, num_samples: int) -> None:
    kv, capture = kv_manager(100), LadderCapture()
    other = step(kv, 6, num_tokens=num_tokens, num_samples=num_samples)

    assert replay(graphs(kv, capture), [step(kv, 7), other]) is None
    assert capture.num_captures == 0


def test_more_rows_than_are_recorded_are_not_replayed() -> None:
    kv = kv_manager(100)

    assert replay(graphs(kv, LadderCapture()), [step(kv, 4) for _ in range(5)]) is None


def test_what_is_refused_with_adapters_is_asked_once_and_still_replayed_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kv, capture = kv_manager(100), LadderCapture(refuses_lora=True)
    recorded = graphs(kv, capture)

    answers = [replay(recorded, [step(kv, 7, slot=slot)]) for slot in (1, 0, -1)]

    assert [answer is None for answer in answers] == [True, True, False]
    assert capture.num_captures == 2
    assert caplog.messages == ["decode steps with adapters are not recorded: no adapters here"]
