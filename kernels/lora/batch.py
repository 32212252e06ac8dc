"""LoRABatch: the adapter slot of each row of one step."""

from dataclasses import dataclass
from typing import Any, Self

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
        slots: Any,
        device: torch.device | str = "cpu",
        capacity: int | None = None,
    ) -> Self | None:
        """Groups the rows of a step by slot.

        Args:
            slots: [T] the slot of each row, `BASE_SLOT` for the base model; a list, an array or a
                tensor on the host.
            device: where the model runs.
            capacity: C, at least the number of slots in use; that number where not given.

        Returns:
            The batch, or None where every row is the base model's, so that nothing of LoRA runs.
        """
        host = torch.as_tensor(slots, dtype=torch.int32)
        num_used = len(torch.unique(host[host != BASE_SLOT]))
        if num_used == 0:
            return None
        batch = cls.grouped(host, num_used if capacity is None else capacity)
        parts = (batch.token_slots, batch.rows, batch.slots, batch.starts)
        return cls(*(part.to(device) for part in parts))

    @classmethod
    def grouped(cls, slots: Any, capacity: int) -> Self:
        """As `build`, on the host, and also where every row is the base model's."""
        host = torch.as_tensor(slots, dtype=torch.int32)
        order = torch.argsort(host, stable=True)[int((host == BASE_SLOT).sum()) :]
        active, counts = torch.unique_consecutive(host[order], return_counts=True)
        used, num_rows = len(active), len(order)
        rows = torch.full((len(host),), -1)
        rows[:num_rows] = order
        padded = torch.full((capacity,), -1)
        padded[:used] = active
        starts = torch.full((capacity + 1,), num_rows)
        starts[0], starts[1 : used + 1] = 0, counts.cumsum(0)
        return cls(host, rows, padded, starts)

    @property
    def num_rows(self) -> int:
        return self.token_slots.shape[0]
