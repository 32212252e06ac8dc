"""StepTapes: steps of all sizes, replayed from two tapes of native calls."""

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from loraplex.engine.step import FlatStep
from loraplex.engine.worker.input_batch import InputBatch
from loraplex.engine.worker.replay.step_buffers import StepBuffers, StepSize
from loraplex.kernels.tape.affine import Sizes
from loraplex.kernels.tape.recorder import RecordingRefused, record
from loraplex.kernels.tape.tape import Tape

logger = logging.getLogger(__name__)

# Prime where they can be, so that no size of a model's is mistaken for one of these.
_BASE = StepSize(13, 5, 3)
_OTHERS = (StepSize(37, 7, 2), StepSize(1, 1, 1))
LARGEST_SAMPLE = StepSize(37, 7, 4)  # what the buffers must hold at least


class StepTapes:
    """Replays any step within the buffers' limits: prompts, parts of prompts, decodes and mixtures.

    One tape is for batches of the base model only, which do no work for LoRA, the other for all
    other batches. Each is recorded before its first step.
    """

    description = "tapes of native calls, recorded when they are first needed"

    def __init__(
        self, buffers: StepBuffers, forward: Callable[[InputBatch], Tensor], num_slots: int
    ) -> None:
        """`num_slots`: adapter slots."""
        self._buffers = buffers
        self._forward = forward
        self._num_slots = num_slots
        self._tapes: dict[bool, Tape | None] = {}  # with LoRA or not; None: refused

    @torch.inference_mode()
    def run(self, step: FlatStep) -> Tensor | None:
        """Returns logits [R, V], valid until the next step; None where the step is not recorded."""
        size = StepSize(len(step.token_ids), len(step.seq_lens), len(step.logits_indices))
        if not self._buffers.limits.holds(size):
            return None
        tape = self._tape(with_lora=step.has_adapter)
        if tape is None:
            return None
        self._buffers.fill(step, size)
        return tape.play(size)

    def prepare(self) -> bool:
        """As `RecordedSteps.prepare`."""
        missing = [kind for kind in (False, True) if kind not in self._tapes]
        if missing:
            self._tape(with_lora=missing[0])
        return len(missing) > 1

    def _tape(self, *, with_lora: bool) -> Tape | None:
        if with_lora not in self._tapes:
            self._tapes[with_lora] = self._try_to_record(with_lora)
        return self._tapes[with_lora]

    def _try_to_record(self, with_lora: bool) -> Tape | None:
        kind = "with adapters " if with_lora else ""
        try:
            return self._record(with_lora)
        except RecordingRefused as reason:
            logger.warning("steps %sare not recorded: %s", kind, reason)
        except Exception:  # a model that fails under the recorder may well run without it
            logger.exception("steps %sare not recorded", kind)
        return None

    @torch.inference_mode()
    def _record(self, with_lora: bool) -> Tape:
        capacity = self._num_slots if with_lora else None

        def arrange(sizes: Sizes) -> Callable[[], Tensor]:
            size = StepSize(*sizes)
            self._buffers.clear(size)
            return partial(self._forward, self._buffers.batch(size, capacity))

        return record(arrange, _BASE, _OTHERS, self._buffers.limits)
