"""InputBatch: the tensors of one step."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.engine.step import FlatStep
from loraplex.engine.worker.attention import AttentionBatch
from loraplex.kernels.attention.spans import QuerySpans
from loraplex.kernels.lora.batch import LoRABatch


@dataclass(frozen=True)
class InputBatch:
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    attention: AttentionBatch
    logits_indices: Tensor  # [R] int64 rows of T whose logits are needed
    hidden_lora: LoRABatch | None  # the T rows' adapters; None: all are the base model's
    logits_lora: LoRABatch | None  # the same of the R rows

    @classmethod
    def of(
        cls, step: FlatStep, device: torch.device, lora_capacity: int | None = None
    ) -> "InputBatch":
        """Builds the batch in memory of its own, of exactly the step's sizes.

        Args:
            lora_capacity: as `LoRABatch.build` takes it; kernels are compiled for each one anew.
        """

        def tensor(numbers: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(numbers).to(device)

        attention = AttentionBatch(
            QuerySpans.of(step.query_start.tolist(), step.seq_lens.tolist(), device),
            list(tensor(step.slot_mapping)),
            tensor(step.block_tables),
        )
        return cls(
            token_ids=tensor(step.token_ids),
            positions=tensor(step.positions),
            attention=attention,
            logits_indices=tensor(step.logits_indices),
            hidden_lora=LoRABatch.build(step.adapter_slots, device, lora_capacity),
            logits_lora=LoRABatch.build(
                step.adapter_slots[step.logits_indices], device, lora_capacity
            ),
        )
