"""Captures that tell what became of them, to put in the place of the engine's own."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from loraplex.engine import assembly
from loraplex.engine.cpu_tape import TapeCapture
from loraplex.engine.step_graphs import CaptureRefused
from loraplex.kernels.native.tape import Tape


class CheckedCapture(TapeCapture):
    """Compares every step from a tape with the same step computed as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals: list[str] = []
        self.are_equal: list[bool] = []  # of each step that was played

    def capture(self, forward: Callable[[], Tensor]) -> "CheckedTape":  # type: ignore[override]
        try:
            return CheckedTape(super().capture(forward), forward, self.are_equal)
        except CaptureRefused as reason:
            self.refusals.append(str(reason))
            raise


@dataclass(frozen=True)
class CheckedTape:
    tape: Tape
    forward: Callable[[], Tensor]
    are_equal: list[bool]

    def play(self) -> Tensor:
        """What the tape gives; what it wrote into the cache is written again, as it comes."""
        logits = self.tape.play()
        self.are_equal.append(torch.equal(logits, self.forward()))
        return logits


def use_capture(monkeypatch: pytest.MonkeyPatch, capture: TapeCapture) -> None:
    """Makes the engines that are assembled from now on record with this."""
    monkeypatch.setattr(assembly, "TapeCapture", lambda: capture)
