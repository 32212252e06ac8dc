"""TrackedAllocator: allocates memory for the tensors of a computation that is being recorded."""

import weakref
from collections import defaultdict
from typing import Any, cast

import torch
from torch import Tensor

_SMALLEST = 4096  # bytes of a piece


class TrackedAllocator:
    """Allocates pieces of memory, numbered in order, and frees each with its last tensor.

    Freed memory is allocated again but never returned to the system: an address belongs to one
    allocation, or to none, as long as this object lives.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)  # by size in bytes
        self._numbers: dict[int, int] = {}  # of the allocations that are open, by address
        self.sizes: list[int] = []  # bytes of each allocation since the last `restart`

    @property
    def num_open(self) -> int:
        return len(self._numbers)

    def restart(self) -> None:
        """Counts from 0 again; open allocations are no longer tracked."""
        self._numbers, self.sizes = {}, []

    def allocate(self, like: Tensor) -> Tensor:
        """Returns a tensor of the same shape, strides and dtype, with undefined numbers."""
        extent = _extent(like)
        size = extent * like.element_size()
        if size == 0:
            return torch.empty_like(like)
        memory = self._take(max(_SMALLEST, 1 << (size - 1).bit_length()))
        lease = memoryview(cast(Any, memory.numpy()))  # lives as long as any tensor on this memory
        number = self._numbers[memory.data_ptr()] = len(self.sizes)
        self.sizes.append(size)
        weakref.finalize(lease, self._give_back, memory, number).atexit = False
        flat = torch.frombuffer(lease, dtype=like.dtype, count=extent)
        return flat.as_strided(like.shape, like.stride())

    def number_of(self, tensor: Tensor) -> int | None:
        """Returns the number of the allocation that holds a tensor's memory; None: no
        allocation."""
        return self._numbers.get(tensor.untyped_storage().data_ptr())

    def _take(self, size: int) -> Tensor:
        return self._free[size].pop() if self._free[size] else torch.empty(size, dtype=torch.uint8)

    def _give_back(self, memory: Tensor, number: int) -> None:
        if self._numbers.get(memory.data_ptr()) == number:
            del self._numbers[memory.data_ptr()]
        self._free[len(memory)].append(memory)


def _extent(tensor: Tensor) -> int:
    """Returns how many numbers lie from the first to the last of a tensor, gaps included."""
    if tensor.numel() == 0:
        return 0
    spans = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in spans)
