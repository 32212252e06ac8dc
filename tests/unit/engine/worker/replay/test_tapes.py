"""Which steps are played from tapes, and when these are recorded."""

import pytest
import torch
from support.engine.kv import admit, kv_manager, sequence_of
from torch import Tensor

from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.scheduling.step_input import ScheduledSequence, flatten
from loraplex.engine.step import FlatStep
from loraplex.engine.worker.input_batch import InputBatch
from loraplex.engine.worker.replay.step_buffers import StepBuffers, StepSize
from loraplex.engine.worker.replay.tapes import LARGEST_SAMPLE, StepTapes

pytestmark = pytest.mark.usefixtures("native_kernels")


class Model:
    """Instead of logits: the position of each row that is wanted."""

    def __init__(self, *, reads_values: bool = False) -> None:
        self.num_passes = 0
        self._reads_values = reads_values

    def __call__(self, batch: InputBatch) -> Tensor:
        self.num_passes += 1
        positions = batch.positions.float()[batch.logits_indices]
        return positions * float(positions.max()) if self._reads_values else positions * 1.0


class BrokenModel(Model):
    def __call__(self, batch: InputBatch) -> Tensor:
        self.num_passes += 1
        raise RuntimeError("not with these inputs")


def tapes(kv: KVCacheManager, model: Model) -> StepTapes:
    limits = StepSize(20, 2, 2).grown(LARGEST_SAMPLE)
    return StepTapes(StepBuffers(kv, limits, 2, torch.device("cpu")), model, num_slots=2)


def prompt(kv: KVCacheManager, length: int, slot: int = -1, num_choices: int = 1) -> FlatStep:
    sequence = sequence_of(list(range(3, 3 + length)))
    sequence.adapter_slot = slot
    admit(kv, sequence)
    assert kv.allocate_slots(sequence, length)
    return flatten([ScheduledSequence(sequence, length, num_choices)], kv)


def test_steps_of_all_sizes_are_played_without_the_model() -> None:
    kv, model = kv_manager(100), Model()
    recorded = tapes(kv, model)
    while recorded.prepare():
        pass
    model.num_passes = 0

    positions = []
    for length in (9, 1, 37):
        logits = recorded.run(prompt(kv, length))
        assert logits is not None
        positions += logits.tolist()

    assert model.num_passes == 0
    assert positions == [8.0, 0.0, 36.0]


def test_each_kind_is_recorded_before_its_first_step() -> None:
    kv, model = kv_manager(100), Model()
    recorded = tapes(kv, model)

    passes = []
    for slot in (-1, -1, 1, 0, -1):
        recorded.run(prompt(kv, 5, slot))
        passes.append(model.num_passes)

    assert 0 < passes[0] == passes[1] < passes[2] == passes[3] == passes[4]


def test_there_is_more_to_prepare_until_both_kinds_are_recorded() -> None:
    recorded = tapes(kv_manager(100), Model())

    assert [recorded.prepare() for _ in range(3)] == [True, False, False]


def test_a_step_without_logits_is_played() -> None:
    kv = kv_manager(100)

    logits = tapes(kv, Model()).run(prompt(kv, 5, num_choices=0))

    assert logits is not None
    assert logits.shape == (0,)


def test_a_step_beyond_the_limits_is_not_played() -> None:
    kv = kv_manager(100)

    assert tapes(kv, Model()).run(prompt(kv, 38)) is None


def test_a_model_that_reads_values_is_asked_once_and_never_played(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kv, model = kv_manager(100), Model(reads_values=True)
    recorded = tapes(kv, model)

    answers = [recorded.run(prompt(kv, 5)) for _ in range(2)]

    assert answers == [None, None]
    assert model.num_passes == 1
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("steps are not recorded: ")


def test_a_model_that_fails_under_the_recorder_is_left_to_run_without_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kv, model = kv_manager(100), BrokenModel()
    recorded = tapes(kv, model)

    answers = [recorded.run(prompt(kv, 5)) for _ in range(2)]

    assert answers == [None, None]
    assert model.num_passes == 1
    assert caplog.messages == ["steps are not recorded"]
