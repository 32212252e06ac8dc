"""Decode steps, recorded as CUDA graphs for a ladder of sizes and replayed."""

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loraplex.engine.step import FlatStep
from loraplex.engine.worker.input_batch import InputBatch
from loraplex.engine.worker.replay.step_buffers import StepBuffers, StepSize

logger = logging.getLogger(__name__)


class CaptureRefused(Exception):
    """Raised where the model's forward pass cannot be replayed; the message says why."""


class StepGraph(Protocol):
    """A forward pass over fixed memory."""

    def play(self) -> Tensor:
        """Returns the logits [R, V] of the current inputs; valid until the next step."""


class GraphCapture(Protocol):
    """The way in which a kind of device records a forward pass."""

    @property
    def sizes(self) -> Sequence[int]:
        """Returns the numbers of rows that steps are padded to, ascending."""

    def capture(self, forward: Callable[[], Tensor]) -> StepGraph:
        """Records `forward`, which may be called more than once.

        Raises:
            CaptureRefused: it cannot be replayed.
        """


class StepGraphs:
    """The graphs of one model: steps in which every sequence has one new token and wants its
    logits.

    Steps with adapters are recorded apart, so that a batch of base rows does no work for LoRA.
    """

    def __init__(
        self,
        buffers: StepBuffers,
        capture: GraphCapture,
        forward: Callable[[InputBatch], Tensor],
        num_slots: int,
    ) -> None:
        """Records all sizes at once, so that no request waits for it. `num_slots`: adapter
        slots."""
        self._buffers = buffers
        self._sizes = capture.sizes
        self._graphs: dict[tuple[int, bool], StepGraph] = {}  # by rows, with LoRA or not
        reasons: list[str] = []
        for with_lora in (False, True):
            try:
                self._record(capture, forward, num_slots if with_lora else None)
            except CaptureRefused as reason:
                kind = "with adapters " if with_lora else ""
                reasons.append(f"decode steps {kind}are not recorded: {reason}")
                logger.warning(reasons[-1])
        counted = f"{len(self._graphs)} of {2 * len(self._sizes)} CUDA graphs"
        self.description = "; ".join([counted, *reasons])

    def run(self, step: FlatStep) -> Tensor | None:
        """Returns the logits [S, V] of a decode step of S sequences; None for any other step, or
        one that is not recorded."""
        count = len(step.seq_lens)
        num_rows = next((size for size in self._sizes if size >= count), None)
        if num_rows is None or not len(step.token_ids) == len(step.logits_indices) == count:
            return None
        graph = self._graphs.get((num_rows, step.has_adapter))
        if graph is None:
            return None
        self._buffers.fill(step, _decode(num_rows))
        return graph.play()[:count]

    def prepare(self) -> bool:
        """As `RecordedSteps.prepare`."""
        return False

    def _record(
        self,
        capture: GraphCapture,
        forward: Callable[[InputBatch], Tensor],
        num_slots: int | None,
    ) -> None:
        for num_rows in reversed(self._sizes):  # the largest first: the others fit in its memory
            self._buffers.clear(_decode(num_rows))
            capacity = None if num_slots is None else min(num_slots, num_rows)
            batch = self._buffers.batch(_decode(num_rows), capacity)
            graph = capture.capture(lambda batch=batch: forward(batch))  # type: ignore[misc]
            self._graphs[num_rows, num_slots is not None] = graph


def _decode(num_rows: int) -> StepSize:
    return StepSize(num_rows, num_rows, num_rows)


_STEP = 8  # between the sizes from here on


def ladder(max_rows: int) -> list[int]:
    """Returns the sizes that decode steps are padded to: 1, 2, 4, then multiples of 8, and
    `max_rows`."""
    small = [size for size in (1, 2, 4) if size < max_rows]
    return [*small, *range(_STEP, max_rows, _STEP), max_rows]


@dataclass(frozen=True)
class CudaGraph:
    """A recorded forward pass, which shares the place of its results with the other graphs."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor

    def play(self) -> Tensor:
        """As `StepGraph.play`."""
        self.graph.replay()
        return self.logits


class CudaCapture:
    """Records CUDA graphs that share their memory: one runs at a time.

    Logits leave a graph's own memory at its end: kept there, they would close each graph's memory
    to the next.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self._logits: Tensor | None = None  # [R, V] for the largest size
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, forward: Callable[[], Tensor]) -> CudaGraph:
        """As `GraphCapture.capture`; what is wrong with the GPU itself is raised as it is."""
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream()
        try:
            logits = self._place_of(self._warm_up(forward))
            # Adapters are read on other threads, which may allocate meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                logits.copy_(forward())
        except RuntimeError as error:
            self._begin_anew()
            if not _is_about_replay(error):
                raise
            raise CaptureRefused(str(error).partition("\n")[0]) from error
        finally:
            torch.cuda.set_stream(before)  # torch stays on the stream of what breaks off
        return CudaGraph(graph, logits)

    def _warm_up(self, forward: Callable[[], Tensor]) -> Tensor:
        """Lets libraries allocate and kernels compile, then makes sure that nothing waits for the
        GPU: a recording would break off there and leave torch's allocator in the middle of it.

        Returns:
            What `forward` gives.
        """
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that this mode is a prototype
                forward()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    return forward()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
        finally:
            before.wait_stream(self._stream)

    def _place_of(self, logits: Tensor) -> Tensor:
        """Returns the rows of the shared memory for such logits."""
        if self._logits is None:
            self._logits = logits.new_zeros(self.sizes[-1], logits.shape[1])
        return self._logits[: len(logits)]

    def _begin_anew(self) -> None:
        """Replaces the memory and the stream, which a broken recording may have left unusable."""
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _is_about_replay(error: RuntimeError) -> bool:
    """Returns whether the pass failed because it cannot be recorded, while the GPU itself is
    fine."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    text = str(error)
    return "called a synchronizing CUDA operation" in text or "captur" in text.lower()
