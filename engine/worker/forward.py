"""Forward: one pass of the model over a flat batch."""

import torch
from torch import Tensor

from loraplex.adapters.layers import LoRAContext
from loraplex.engine.model.loader import LoadedModel
from loraplex.engine.worker.attention import AttentionContext
from loraplex.engine.worker.input_batch import InputBatch


class Forward:
    """Runs transformers' own model with our attention and linears in it.

    Attributes:
        lora_capacity: of the batches of adapters that it is to be given; None: any.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        attention: AttentionContext,
        lora: LoRAContext,
        num_slots: int | None = None,
    ) -> None:
        """`num_slots`: adapter slots, where kernels are compiled for their number."""
        self.device: torch.device = loaded.device
        self.lora_capacity = num_slots
        self._model = loaded.model
        self._attention = attention
        self._lora = lora

    def __call__(self, batch: InputBatch) -> Tensor:
        """Returns the logits [R, V] of the rows that need them."""
        self._attention.batch = batch.attention
        self._lora.hidden, self._lora.logits = batch.hidden_lora, batch.logits_lora
        try:
            output = self._model(
                input_ids=batch.token_ids.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=batch.logits_indices,
            )
        finally:
            self._attention.batch = None
            self._lora.hidden = self._lora.logits = None
        logits = output.logits[0]
        assert isinstance(logits, Tensor)
        return logits
