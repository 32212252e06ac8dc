"""StepGraphs: decode steps recorded once per number of rows, and replayed."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from loraplex.engine.input_batch import InputBatch
from loraplex.engine.scheduler import ScheduledSequence
from loraplex.engine.step_buffers import StepBuffers

logger = logging.getLogger(__name__)


class CaptureRefused(Exception):
    """The model's forward pass cannot be replayed; the message says why."""


class StepGraph(Protocol):
    """A forward pass over fixed memory."""

    def play(self) -> Tensor:
        """-> [R, V] logits of what is in the inputs now; they are there until the next step."""


class GraphCapture(Protocol):
    """How a kind of device records a forward pass."""

    def padded(self, num_rows: int) -> int | None:
        """With how many rows a step of so many is recorded; None: it is not."""

    def capture(self, forward: Callable[[], Tensor]) -> StepGraph:
        """Records what `forward` does; it may be called more than once.

        Raises:
            CaptureRefused: it cannot be replayed.
        """


class StepGraphs:
    """The graphs of one model, recorded at once or else when a size comes for the second time: many
    a size is only passed on the way to another.

    Steps with adapters are recorded apart, so that a batch of base rows does nothing for LoRA.
    """

    def __init__(
        self,
        buffers: StepBuffers,
        capture: GraphCapture,
        forward: Callable[[InputBatch], Tensor],
    ) -> None:
        self._buffers = buffers
        self._capture = capture
        self._forward = forward
        self._graphs: dict[tuple[int, bool], StepGraph] = {}  # by rows, with LoRA or not
        self._seen: set[tuple[int, bool]] = set()  # the same, of steps that were not replayed
        self._refused: set[bool] = set()  # with LoRA or not

    def prepare(self, sizes: Iterable[int]) -> None:
        """Records steps of so many rows now, the largest first, so that no request waits for it."""
        for num_rows in sorted(sizes, reverse=True):
            for with_lora in (False, True):
                self._record((num_rows, with_lora))

    def run(self, scheduled: Sequence[ScheduledSequence]) -> Tensor | None:
        """-> [S, V] logits of a decode step of S sequences, or None where the step is another one
        or is not recorded."""
        if not all(map(_is_decode, scheduled)) or False in self._refused:
            return None
        num_rows = self._capture.padded(len(scheduled))
        if num_rows is None:
            return None
        with_lora = self._buffers.fill(scheduled, num_rows)
        graph = self._graph(num_rows, with_lora)
        return None if graph is None else graph.play()[: len(scheduled)]

    def _graph(self, num_rows: int, with_lora: bool) -> StepGraph | None:
        key = num_rows, with_lora
        if key in self._seen and key not in self._graphs:
            self._record(key)
        self._seen.add(key)
        return self._graphs.get(key)

    def _record(self, key: tuple[int, bool]) -> None:
        num_rows, with_lora = key
        if with_lora in self._refused:
            return
        batch = self._buffers.batch(num_rows, with_lora=with_lora)
        try:
            self._graphs[key] = self._capture.capture(lambda: self._forward(batch))
        except CaptureRefused as reason:
            self._refused.add(with_lora)
            kind = "with adapters " if with_lora else ""
            logger.warning("decode steps %sare not recorded: %s", kind, reason)


def _is_decode(item: ScheduledSequence) -> bool:
    """Whether the step computes a sequence's last token alone, for its logits."""
    last = item.num_tokens == 1 and item.num_samples > 0
    return last and not item.sequence.owes_prompt_logprobs
