"""ModelRunner: one step on the device, from what is scheduled to what is sampled."""

import torch

from loraplex.adapters.layers import LoRAContext
from loraplex.engine.attention import AttentionContext
from loraplex.engine.input_batch import InputBatch, build_input_batch
from loraplex.engine.kv_cache import KVCache
from loraplex.engine.kv_cache_manager import KVCacheManager
from loraplex.engine.model_loader import LoadedModel
from loraplex.engine.sampler import Sampler
from loraplex.engine.scheduler import ModelRunnerOutput, SchedulerOutput
from loraplex.kernels.lora.batch import LoRABatch


class ModelRunner:
    """Runs transformers' own model, with our attention and linears in it, over a flat batch."""

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KVCache,
        attention: AttentionContext,
        lora: LoRAContext,
        sampler: Sampler,
    ) -> None:
        self._model = loaded.model
        self._device = loaded.device
        self._cache = cache
        self._attention = attention
        self._lora = lora
        self._sampler = sampler

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput, kv: KVCacheManager) -> ModelRunnerOutput:
        """Copies shared blocks that are about to be written, computes, samples."""
        self._cache.copy(output.copies)
        if not output.scheduled:
            return ModelRunnerOutput()
        batch = build_input_batch(output.scheduled, kv, self._device)
        logits = self._forward(batch)
        return self._sampler.sample(logits, batch.logits_rows)

    def _forward(self, batch: InputBatch) -> torch.Tensor:
        """-> [R, V] logits of the rows that need them."""
        slots = batch.adapter_slots
        self._attention.batch = batch.attention
        self._lora.hidden = LoRABatch.build(slots, self._device)
        self._lora.logits = LoRABatch.build(slots[batch.logits_indices], self._device)
        try:
            output = self._model(
                input_ids=batch.token_ids.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=torch.from_numpy(batch.logits_indices).to(self._device),
            )
        finally:
            self._attention.batch = None
            self._lora.hidden = self._lora.logits = None
        logits = output.logits[0]
        assert isinstance(logits, torch.Tensor)
        return logits
