"""LoRABatch: which adapter slot each row of one step belongs to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

BASE_SLOT = -1


@dataclass(frozen=True, eq=False)
class LoRABatch:
    """The adapter slots of a flat batch of rows, at least one of which is not the base model's.

    Rows with an adapter are grouped into segments, one for each slot in use. Shapes follow from
    the number of rows T and the capacity C of segments alone, so that the tensors may be refreshed
    in place; what is not in use is -1, and an unused segment is empty.
    """

    token_slots: Tensor  # [T] int32; BASE_SLOT for a row of the base model
    rows: Tensor  # [T] int64, by slot, ascending within each; -1 behind the last
    slots: Tensor  # [C] int64, ascending; -1 behind the last
    starts: Tensor  # [C + 1] int64, where in `rows` each segment begins and the last one ends

    @classmethod
    def build(
        cls,
        slots: Sequence[int] | np.ndarray,
        device: torch.device | str = "cpu",
        capacity: int | None = None,
    ) -> Self | None:
        """Groups the rows of a step by slot.

        Args:
            slots: [T] the slot of each row, `BASE_SLOT` for the base model.
            device: where the model runs.
            capacity: C, at least the number of slots in use; that number where not given.

        Returns:
            The batch, or None where every row is the base model's, so that nothing of LoRA runs.
        """
        host = np.asarray(slots, dtype=np.int32)
        active, counts = np.unique(host[host != BASE_SLOT], return_counts=True)
        if active.size == 0:
            return None
        capacity = active.size if capacity is None else capacity
        order = np.argsort(host, kind="stable")[host.size - counts.sum() :]
        rows = np.full(host.size, -1, np.int64)
        rows[: order.size] = order
        padded = np.full(capacity, -1, np.int64)
        padded[: active.size] = active
        starts = np.full(capacity + 1, order.size, np.int64)
        starts[: active.size + 1] = np.concatenate([[0], np.cumsum(counts)])
        return cls(*(torch.from_numpy(part).to(device) for part in (host, rows, padded, starts)))

    @property
    def num_rows(self) -> int:
        return self.token_slots.shape[0]
