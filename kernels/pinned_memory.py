"""Host memory that a GPU reads and writes by itself, in pieces of exactly the size asked for.

torch's own allocator rounds every piece up to a power of two: up to twice what is needed.
"""

import contextlib
import ctypes
import math
import mmap
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


class _Pinned(mmap.mmap):
    """A mapping that the driver knows until it is freed."""

    release: tuple[Callable[[], object], ...] = ()  # what has to be done then

    def __del__(self) -> None:
        if not sys.is_finalizing():
            for step in self.release:
                step()


def pinned(*shape: int, dtype: torch.dtype) -> Tensor:
    """Returns a contiguous tensor of zeros on the CPU, whose pages stay in place.

    Raises:
        OSError: the system or the driver does not give so much.
    """
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    mapping = _Pinned(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(address, len(mapping), _PORTABLE)
    if int(status) != 0:
        with contextlib.suppress(RuntimeError):  # else the next launch would report this error
            torch.zeros(1, device="cuda")
        raise OSError(f"the GPU's driver pins no {len(mapping):,} bytes of host memory: {status}")
    # A copy may still be reading from it when it goes.
    mapping.release = torch.cuda.synchronize, partial(runtime.cudaHostUnregister, address)
    return torch.frombuffer(mapping, dtype=dtype, count=count).view(shape)
