"""Steps from tapes that are compared with the same steps computed as they come."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from loraplex.engine.build import recording
from loraplex.engine.step import FlatStep
from loraplex.engine.worker.input_batch import InputBatch
from loraplex.engine.worker.replay.tapes import StepTapes


@dataclass
class StepLog:
    are_equal: list[bool] = field(default_factory=list)  # of each step that was played
    num_unrecorded: int = 0  # steps that were not

    @property
    def is_clean(self) -> bool:
        """Whether every step was played, and gave the same logits to the bit."""
        return bool(self.are_equal) and all(self.are_equal) and self.num_unrecorded == 0


class CheckedTapes(StepTapes):
    """Compares what tapes give; before one is played, its memory is filled with NaN."""

    def __init__(self, log: StepLog, *parts: Any) -> None:
        super().__init__(*parts)
        self._log = log

    def run(self, step: FlatStep) -> Tensor | None:
        """What the tape gives; what it wrote into the cache is written again, as it comes."""
        for tape in self._tapes.values():
            if tape is not None:
                tape.arena.fill_(0xFF)
        logits = super().run(step)
        if logits is None:
            self._log.num_unrecorded += 1
        else:
            as_it_comes = self._forward(InputBatch.of(step, torch.device("cpu")))
            self._log.are_equal.append(torch.equal(logits, as_it_comes))
        return logits


def check_steps(monkeypatch: pytest.MonkeyPatch) -> StepLog:
    """Makes the engines that are assembled from now on check their steps."""
    log = StepLog()
    monkeypatch.setattr(recording, "StepTapes", partial(CheckedTapes, log))
    return log
