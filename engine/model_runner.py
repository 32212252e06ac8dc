"""ModelRunner: one step on the device, from what is scheduled to what is sampled."""

import torch

from loraplex.engine.forward import Forward
from loraplex.engine.input_batch import build_input_batch, logits_rows
from loraplex.engine.kv_cache import KVCache
from loraplex.engine.kv_cache_manager import KVCacheManager
from loraplex.engine.sampler import Sampler
from loraplex.engine.scheduler import ModelRunnerOutput, SchedulerOutput
from loraplex.engine.step_graphs import StepGraphs


class ModelRunner:
    """Computes what the scheduler chose: decode steps from recorded graphs where there are some."""

    def __init__(
        self, forward: Forward, cache: KVCache, sampler: Sampler, graphs: StepGraphs | None
    ) -> None:
        self._forward = forward
        self._cache = cache
        self._sampler = sampler
        self._graphs = graphs

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput, kv: KVCacheManager) -> ModelRunnerOutput:
        """Copies shared blocks that are about to be written, computes, samples."""
        self._cache.copy(output.copies)
        if not output.scheduled:
            return ModelRunnerOutput()
        logits = self._graphs.run(output.scheduled) if self._graphs else None
        if logits is None:
            batch = build_input_batch(output.scheduled, kv, self._forward.device)
            logits = self._forward(batch)
        return self._sampler.sample(logits, logits_rows(output.scheduled))
