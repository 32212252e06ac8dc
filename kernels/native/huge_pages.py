"""Memory in large pages: streams that are read whole run up to twice as fast out of it."""

import contextlib
import ctypes
import math
import mmap

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes: a cache line
_SLACK = 4 << 20  # what lies before the first and behind the last large page
_POPULATE_WRITE = 23  # advice of Linux 5.14 and newer: fault pages in as a write would


def give_back_freed_memory() -> None:
    """Makes the C library return freed memory to the system, if it can."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def populate(tensor: Tensor) -> None:
    """Gives a contiguous tensor its memory now and keeps its content. Only Linux can."""
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - first
    with contextlib.suppress(AttributeError):
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _POPULATE_WRITE)


class HugePages:
    """One mapping, handed out in pieces; it lives as long as any of them.

    Where the system has no large pages, its usual ones are used.
    """

    def __init__(self, num_bytes: int) -> None:
        # Private: shared memory, which is the default, gets no large pages.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._mapping = mmap.mmap(-1, num_bytes + _SLACK, flags=flags)
        self._end = 0
        with contextlib.suppress(OSError, AttributeError):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Returns a contiguous tensor on the CPU, with undefined numbers.

        Raises:
            ValueError: there is no room for it.
        """
        start, size = self._end, math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        if start + size > len(self._mapping):
            raise ValueError(f"no room for {size} bytes after {start} of {len(self._mapping)}")
        self._end = -(-(start + size) // _ALIGNMENT) * _ALIGNMENT
        flat = torch.frombuffer(self._mapping, dtype=dtype, count=math.prod(shape), offset=start)
        return flat.view(shape)


class HugePageChunks:
    """Large pages for many small tensors that come and go: each is cut from the newest chunk.

    A chunk's memory is freed when the last tensor in it is gone, so what is made together should go
    together. Not for several threads at once.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._chunk: HugePages | None = None

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Returns a tensor as `HugePages.empty` does, but never runs out of room."""
        if self._chunk is not None:
            with contextlib.suppress(ValueError):
                return self._chunk.empty(*shape, dtype=dtype)
        self._chunk = HugePages(max(self._num_bytes, math.prod(shape) * dtype.itemsize))
        return self._chunk.empty(*shape, dtype=dtype)
