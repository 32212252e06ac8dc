"""Recording of forward passes on a CPU."""

from collections.abc import Callable

from torch import Tensor

from loraplex.engine.step_graphs import CaptureRefused
from loraplex.kernels.native.arena import Arena
from loraplex.kernels.native.recorder import RecordingRefused, record
from loraplex.kernels.native.tape import Tape


class TapeCapture:
    """Records onto tapes, with exactly the rows of the step: nothing is padded."""

    def __init__(self) -> None:
        self._arena = Arena()  # tapes play one at a time

    def padded(self, num_rows: int) -> int:
        return num_rows

    def capture(self, forward: Callable[[], Tensor]) -> Tape:
        """As `GraphCapture.capture`."""
        try:
            return record(forward, self._arena)
        except RecordingRefused as reason:
            raise CaptureRefused(str(reason)) from reason
