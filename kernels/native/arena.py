"""Arena: working memory that is lent in pieces, one owner after another."""

import weakref
from collections import defaultdict
from typing import Any, cast

import torch
from torch import Tensor

_SMALLEST = 4096  # bytes of a piece


class Arena:
    """Lends memory to tensors, and takes it back when the last tensor on it is gone.

    Freed memory is lent again, the warmest first, so that many recorded computations that never run
    at once share what the largest of them needs.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)  # by size in bytes
        self._memory: dict[int, Tensor] = {}  # by address: all that was ever lent, as bytes
        self.num_lent = 0

    @property
    def num_bytes(self) -> int:
        """All that it has from the system."""
        return sum(len(memory) for memory in self._memory.values())

    def empty_like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape, strides and dtype, of numbers nobody has set."""
        size = _extent(tensor) * tensor.element_size()
        if size == 0:
            return torch.empty_like(tensor)
        memory = self._take(max(_SMALLEST, 1 << (size - 1).bit_length()))
        lease = memoryview(cast(Any, memory.numpy()))  # lives as long as any tensor on this memory
        self.num_lent += 1
        weakref.finalize(lease, self._give_back, memory).atexit = False
        flat = torch.frombuffer(lease, dtype=tensor.dtype, count=_extent(tensor))
        return flat.as_strided(tensor.shape, tensor.stride())

    def owns(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._memory

    def alias(self, tensor: Tensor) -> Tensor:
        """A tensor on the same memory that does not keep it from being lent again."""
        memory = self._memory[tensor.untyped_storage().data_ptr()]
        flat = memory.view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _take(self, size: int) -> Tensor:
        if self._free[size]:
            return self._free[size].pop()
        memory = torch.empty(size, dtype=torch.uint8)
        self._memory[memory.data_ptr()] = memory
        return memory

    def _give_back(self, memory: Tensor) -> None:
        self.num_lent -= 1
        self._free[len(memory)].append(memory)


def _extent(tensor: Tensor) -> int:
    """Numbers from the first to the last of a tensor, those between them included."""
    if tensor.numel() == 0:
        return 0
    spans = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in spans)
