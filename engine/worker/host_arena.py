"""HostArena: the memory behind the host tier's slots."""

import torch
from torch import Tensor

from loraplex.engine.worker.kv_cache import BlockStorage
from loraplex.kernels.dispatch import choose_kernels
from loraplex.kernels.pinned_memory import pinned as pinned_memory


class HostArena:
    """Blocks in host memory, laid out as on the device."""

    def __init__(
        self, num_slots: int, widths: list[int], dtype: torch.dtype, *, pinned: bool
    ) -> None:
        """Args:
        widths: numbers of a block in each storage.
        pinned: page-locked, as a GPU needs it to copy without the CPU; taken at once then, else
            as it is used.

        Raises:
            OSError: so much memory is not to be had.
        """
        host = torch.device("cpu")
        kernels = choose_kernels("auto", host, dtype)
        rows = (
            _pinned_rows(num_slots, widths, dtype)
            if pinned
            else [kernels.empty(num_slots, width, dtype=dtype, device=host) for width in widths]
        )
        self.storage = BlockStorage(rows, kernels)
        self._bytes = [row.view(torch.uint8).numpy() for row in rows]

    @property
    def num_slots(self) -> int:
        return self.storage.num_blocks

    @property
    def bytes_per_slot(self) -> int:
        return self.storage.bytes_per_block

    def read(self, slot: int) -> bytes:
        """Returns a copy of a block, its parts one after another."""
        return b"".join(part[slot].tobytes() for part in self._bytes)

    def write(self, slot: int, content: bytes | memoryview) -> None:
        """Writes what `read` returned."""
        start = 0
        for part in self._bytes:
            end = start + part.shape[1]
            memoryview(part[slot])[:] = content[start:end]
            start = end


def _pinned_rows(num_slots: int, widths: list[int], dtype: torch.dtype) -> list[Tensor]:
    """Allocates all rows in one piece, which is pinned at once."""
    sizes = [num_slots * width for width in widths]
    memory = pinned_memory(sum(sizes), dtype=dtype)
    parts = zip(torch.split(memory, sizes), widths, strict=True)
    return [part.view(num_slots, width) for part, width in parts]
