"""CUDA graphs of forward passes, for a ladder of batch sizes."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.engine.step_graphs import CaptureRefused

_STEP = 8  # between the sizes from here on


def ladder(max_rows: int) -> list[int]:
    """The sizes that decode steps are padded to: 1, 2, 4, then multiples of 8, `max_rows` last."""
    small = [size for size in (1, 2, 4) if size < max_rows]
    return [*small, *range(_STEP, max_rows, _STEP), max_rows]


@dataclass(frozen=True)
class CudaGraph:
    """A recorded forward pass; the memory of its results is that of the other graphs, too."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor

    def play(self) -> Tensor:
        """As `StepGraph.play`."""
        self.graph.replay()
        return self.logits


class CudaCapture:
    """Records CUDA graphs, which share their memory: one runs at a time."""

    def __init__(self, max_rows: int) -> None:
        self.sizes = ladder(max_rows)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, forward: Callable[[], Tensor]) -> CudaGraph:
        """As `GraphCapture.capture`."""
        graph = torch.cuda.CUDAGraph()
        try:
            self._warm_up(forward)
            # Adapters are read on other threads, which may allocate meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                logits = forward()
        except RuntimeError as error:  # the pass looked at a value on the host, or the like
            raise CaptureRefused(str(error).partition("\n")[0]) from error
        return CudaGraph(graph, logits)

    def _warm_up(self, forward: Callable[[], Tensor]) -> None:
        """Lets libraries allocate and kernels be compiled, then makes sure that nothing waits for
        the GPU: a recording would break off there, and leave torch's allocator in its middle."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this mode is a prototype
            forward()
            torch.cuda.set_sync_debug_mode("error")
            try:
                forward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        torch.cuda.current_stream().wait_stream(self._stream)
