"""ModelRunner: one step on the device, from what is scheduled to what is sampled."""

from typing import Protocol

import torch
from torch import Tensor

from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.kv.tiers import Transfers
from loraplex.engine.scheduling.scheduler import ModelRunnerOutput, SchedulerOutput
from loraplex.engine.worker.flat_step import FlatStep, flatten, logits_rows
from loraplex.engine.worker.forward import Forward
from loraplex.engine.worker.input_batch import InputBatch
from loraplex.engine.worker.kv_cache import KVCache
from loraplex.engine.worker.sampler import Sampler


class RecordedSteps(Protocol):
    """Steps that can be replayed without the model's Python code."""

    def run(self, step: FlatStep) -> Tensor | None:
        """-> [R, V] logits, there until the next step; None where such a step is not recorded."""

    def prepare(self) -> bool:
        """Records something now that would else be recorded when it is needed.

        Returns:
            Whether there is more.
        """


class ModelRunner:
    """Computes what the scheduler chose, by replay where that can be."""

    def __init__(
        self,
        forward: Forward,
        cache: KVCache,
        sampler: Sampler,
        recorded: RecordedSteps | None,
        transfers: Transfers | None = None,
    ) -> None:
        """`transfers` moves blocks between tiers; None: there is one tier."""
        self._forward = forward
        self._cache = cache
        self._sampler = sampler
        self._recorded = recorded
        self._transfers = transfers

    def prepare(self) -> bool:
        """As `RecordedSteps.prepare`."""
        return self._recorded is not None and self._recorded.prepare()

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput, kv: KVCacheManager) -> ModelRunnerOutput:
        """Swaps, copies shared blocks that are about to be written, computes, samples."""
        if self._transfers is not None:
            self._transfers.move(output.moves)
        self._cache.copy(output.copies)
        if not output.scheduled:
            return ModelRunnerOutput()
        step = flatten(output.scheduled, kv)
        logits = self._recorded.run(step) if self._recorded else None
        if logits is None:
            logits = self._forward(InputBatch.of(step, self._forward.device))
        return self._sampler.sample(logits, logits_rows(output.scheduled))
