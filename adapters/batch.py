"""LoRABatch: which adapter slot each row of one step belongs to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

BASE_SLOT = -1


@dataclass(frozen=True)
class LoRASegment:
    """The rows of one slot in a flat batch."""

    slot: int
    rows: torch.Tensor  # [n] int64, ascending


@dataclass(frozen=True, eq=False)
class LoRABatch:
    """The adapter slots of a flat batch of rows, at least one of which is not the base model's."""

    token_slots: torch.Tensor  # [T] int32, on the device; BASE_SLOT for a row of the base model
    segments: tuple[LoRASegment, ...]  # one per slot in use, ascending by slot
    _host_slots: np.ndarray  # [T] int32, the same on the host

    @classmethod
    def build(cls, slots: Sequence[int] | np.ndarray, device: torch.device) -> Self | None:
        """Groups the rows of a step by slot.

        Args:
            slots: [T] the slot of each row, `BASE_SLOT` for the base model.
            device: where the model runs.

        Returns:
            The batch, or None where every row is the base model's, so that nothing of LoRA runs.
        """
        host = np.asarray(slots, dtype=np.int32)
        active = np.unique(host[host != BASE_SLOT])
        if active.size == 0:
            return None
        segments = tuple(
            LoRASegment(int(slot), torch.from_numpy(np.flatnonzero(host == slot)).to(device))
            for slot in active
        )
        return cls(torch.from_numpy(host).to(device), segments, host)

    @property
    def num_rows(self) -> int:
        return len(self._host_slots)

    def select(self, rows: Sequence[int] | np.ndarray) -> Self | None:
        """The batch of a choice of rows, in that order, such as those that reach lm_head."""
        chosen = self._host_slots[np.asarray(rows, dtype=np.int64)]
        return self.build(chosen, self.token_slots.device)
