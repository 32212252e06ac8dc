"""Transfers: a step's blocks between the device and host memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loraplex.engine.block_storage import BlockStorage
from loraplex.engine.swap.staging import Staging


@dataclass(frozen=True)
class BlockMoves:
    """What is swapped in one step: first out, then in, before anything else is read or written."""

    offloads: tuple[tuple[int, int], ...] = ()  # (block id, host slot)
    fetches: tuple[tuple[int, int], ...] = ()  # (host slot, block id)


NO_MOVES = BlockMoves()


class Transfers(Protocol):
    """However many blocks are moved, each storage is gathered from once and written to once."""

    def move(self, moves: BlockMoves) -> None:
        """Starts a step's moves, in the order of the device's work. Block ids and slots are each
        but once among the targets."""

    def finish(self) -> None:
        """Returns when all that was offloaded is in its slots."""

    def read(self, block_ids: Sequence[int]) -> list[bytes]:
        """The content of the device's blocks, at once."""


class HostTransfers:
    """For a device whose memory is the host's own: each move is done when it returns."""

    def __init__(self, device: BlockStorage, arena: BlockStorage) -> None:
        self._device = device
        self._arena = arena
        dtype = device.rows[0].dtype
        self._staging = Staging(device.widths, lambda count: torch.empty(count, dtype=dtype))

    @torch.inference_mode()
    def move(self, moves: BlockMoves) -> None:
        """As `Transfers.move`."""
        self._pass(self._device, self._arena, moves.offloads)
        self._pass(self._arena, self._device, moves.fetches)

    def finish(self) -> None:
        """As `Transfers.finish`."""

    def read(self, block_ids: Sequence[int]) -> list[bytes]:
        """As `Transfers.read`."""
        return self._device.read(block_ids)

    def _pass(
        self, source: BlockStorage, target: BlockStorage, pairs: Sequence[tuple[int, int]]
    ) -> None:
        if not pairs:
            return
        sources, targets = id_tensors(pairs)
        parts = self._staging.parts(len(pairs))
        source.gather(sources, parts)
        target.scatter(targets, parts)


def id_tensors(pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """[C] int64 of what moves, and of where to."""
    return torch.tensor([a for a, _ in pairs]), torch.tensor([b for _, b in pairs])
