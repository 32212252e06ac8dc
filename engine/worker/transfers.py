"""Transfers: copies of KV blocks between a device and host memory."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from loraplex.engine.step import BlockMoves
from loraplex.engine.worker.kv_cache import BlockStorage
from loraplex.kernels.pinned_memory import pinned


class Staging:
    """Blocks of several widths in one flat tensor, so that one copy moves them all."""

    def __init__(self, widths: list[int], make: Callable[[int], Tensor]) -> None:
        """`make` returns a flat tensor of so many numbers."""
        self._widths = widths
        self._make = make
        self._flat = make(0)

    def flat(self, num_blocks: int) -> Tensor:
        """Returns the part for so many blocks; valid until the next call."""
        needed = num_blocks * sum(self._widths)
        if len(self._flat) < needed:
            self._flat = self._make(max(needed, 2 * len(self._flat)))
        return self._flat[:needed]

    def parts(self, num_blocks: int) -> list[Tensor]:
        """Returns the same part as [C, E_j] for each width."""
        sizes = [num_blocks * width for width in self._widths]
        parts = torch.split(self.flat(num_blocks), sizes)
        return [part.view(num_blocks, -1) for part in parts]


class HostTransfers:
    """Moves blocks of a device whose memory is the host's own: each move is complete when it
    returns."""

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
    """Returns the ids [C] int64 of the moved blocks and of their targets."""
    return torch.tensor([a for a, _ in pairs]), torch.tensor([b for _, b in pairs])


_STAGED_BYTES = 64 << 20  # of one direction, on either side: enough for the bus at its full speed
STAGED_ON_DEVICE = 2 * _STAGED_BYTES  # what `CudaTransfers` takes of a GPU's memory, at most


class CudaTransfers:
    """Moves blocks of a GPU. Offloaded blocks are gathered before the step and copied out while it
    is computed; fetched blocks are copied in before the step, which needs them.

    Its memory is allocated at once and never grows: more blocks go in several parts, of which only
    the last one is copied out during the step.
    """

    def __init__(
        self, device: BlockStorage, arena: BlockStorage, staged_bytes: int = _STAGED_BYTES
    ) -> None:
        """`staged_bytes`: for one direction, on either side; at least one block's.

        Raises:
            OSError: so much pinned memory is not to be had.
        """
        self._device = device
        self._arena = arena
        self._most = max(1, min(staged_bytes // device.bytes_per_block, arena.num_blocks))
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._gathered = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied_out = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied_in = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._out = Staging(device.widths, self._on_device)
        self._in = Staging(device.widths, self._on_device)
        self._host_out = Staging(device.widths, self._pinned)
        self._host_in = Staging(device.widths, self._pinned)
        for staging in (self._out, self._in, self._host_out, self._host_in):
            staging.flat(self._most)
        self._leaving: Tensor | None = None  # the slots that what is being copied out goes to

    @torch.inference_mode()
    def move(self, moves: BlockMoves) -> None:
        """As `Transfers.move`."""
        for pairs in self._parts(moves.offloads):
            self._offload(pairs)
        for pairs in self._parts(moves.fetches):
            self._fetch(pairs)

    @torch.inference_mode()
    def finish(self) -> None:
        """As `Transfers.finish`."""
        if self._leaving is None:
            return
        self._copied_out.synchronize()
        self._arena.scatter(self._leaving, self._host_out.parts(len(self._leaving)))
        self._leaving = None

    def read(self, block_ids: Sequence[int]) -> list[bytes]:
        """As `Transfers.read`."""
        return self._device.read(block_ids)

    def _parts(self, pairs: Sequence[tuple[int, int]]) -> list[Sequence[tuple[int, int]]]:
        """Splits moves into parts that fit into the staging memory."""
        starts = range(0, len(pairs), self._most)
        return [pairs[start : start + self._most] for start in starts]

    def _offload(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.finish()  # the buffers are free again
        blocks, self._leaving = id_tensors(pairs)
        count = len(pairs)
        self._device.gather(blocks.to(self._device.rows[0].device), self._out.parts(count))
        self._gathered.record()
        self._stream.wait_event(self._gathered)
        with torch.cuda.stream(self._stream):
            self._host_out.flat(count).copy_(self._out.flat(count), non_blocking=True)
            self._copied_out.record()

    def _fetch(self, pairs: Sequence[tuple[int, int]]) -> None:
        slots, blocks = id_tensors(pairs)
        count = len(pairs)
        self._copied_in.synchronize()  # the last step's copy has read the buffer
        self._arena.gather(slots, self._host_in.parts(count))
        self._in.flat(count).copy_(self._host_in.flat(count), non_blocking=True)
        self._copied_in.record()
        self._device.scatter(blocks.to(self._device.rows[0].device), self._in.parts(count))

    def _on_device(self, count: int) -> Tensor:
        like = self._device.rows[0]
        return torch.empty(count, dtype=like.dtype, device=like.device)

    def _pinned(self, count: int) -> Tensor:
        return pinned(count, dtype=self._device.rows[0].dtype)
