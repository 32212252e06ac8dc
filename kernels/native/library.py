"""The native kernels as a loaded library: plain C functions on addresses and sizes."""

import contextlib
import ctypes
import functools
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from loraplex.kernels.native.build import (
    NativeUnavailable,
    Target,
    build,
    choose_target,
    cpu_flags,
    find_compiler,
)

_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_long, "i": ctypes.c_int, "f": ctypes.c_float}
_SIGNATURES = {  # the arguments of each function: a pointer, a long, an int, a float
    "lpx_add_embedding_lora_bf16": "plpfppppli",
    "lpx_add_embedding_lora_float": "plpfppppli",
    "lpx_add_lora_bf16": "plplppppli",
    "lpx_add_lora_float": "plplppppli",
    **{f"lpx_arithmetic_{formats}": "ppppii" for formats in ("fff", "fbf", "bff", "bfb", "bbb")},
    "lpx_argmax_bf16": "pllllpppi",
    "lpx_argmax_float": "pllllpppi",
    "lpx_attention_bf16": "pppppppppffi",
    "lpx_attention_float": "pppppppppffi",
    **{f"lpx_convert_{formats}": "pppi" for formats in ("fb", "bf", "lf")},
    "lpx_copy_blocks": "pppllli",
    "lpx_copy_strided": "pppii",
    "lpx_draw_bf16": "pllpppppppli",
    "lpx_draw_float": "pllpppppppli",
    "lpx_gated_gelu_tanh_bf16": "pplli",
    "lpx_gated_gelu_tanh_float": "pplli",
    "lpx_gated_silu_bf16": "pplli",
    "lpx_gated_silu_float": "pplli",
    "lpx_gather_blocks": "pppllli",
    "lpx_gather_rows": "plppllli",
    "lpx_int8_linear": "pllpppppllli",
    "lpx_int8_rows": "ppppllli",
    "lpx_linear_bf16": "ppppllllli",
    "lpx_linear_float": "ppppllllli",
    "lpx_pack_int8": "pllppplli",
    "lpx_pack_lora_shrink_bf16": "pllpi",
    "lpx_pack_lora_shrink_float": "pllpi",
    "lpx_pack_lora_expand_bf16": "pllpi",
    "lpx_pack_lora_expand_float": "pllpi",
    "lpx_pack_panels_bf16": "plplli",
    "lpx_pack_panels_float": "plplli",
    "lpx_packed_rows_bf16": "pppllli",
    "lpx_packed_rows_float": "pppllli",
    "lpx_parallel_for": "lipp",
    "lpx_play": "pl",
    "lpx_rms_norm_bf16": "pppfpii",
    "lpx_rms_norm_float": "pppfpii",
    "lpx_rotate_bf16": "ppppppi",
    "lpx_rotate_float": "ppppppi",
    "lpx_scatter_blocks": "pppllli",
    "lpx_write_cache": "ppppppi",
}


@functools.cache
def native() -> ctypes.CDLL:
    """Returns the library for this machine, compiled on first use into the user's cache folder.

    Raises:
        NativeUnavailable: saying why there is none.
    """
    return load(choose_target(cpu_flags()), cache_folder())


def build_name() -> str:
    """Names the library of `native`: the kind of CPU, and a digest of sources, flags and compiler.

    Raises:
        NativeUnavailable: saying why there is none.
    """
    return Path(native()._name).stem


def load(target: Target, folder: Path) -> ctypes.CDLL:
    """Loads the library for one kind of CPU, compiling it where the folder does not have it.

    Raises:
        NativeUnavailable: saying why that does not go.
    """
    path = build(target, find_compiler(), folder)
    try:
        library = ctypes.CDLL(str(path))
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = [_TYPES[letter] for letter in arguments]
            function.restype = None
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"cannot load {path}: {error}") from error
    return library


Argument: TypeAlias = (
    "Tensor | array[int] | int | float | None"  # of the first two: the address is passed
)
Listener: TypeAlias = Callable[[str, tuple[Argument, ...]], None]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.listeners: list[Listener] = []


_this_thread = _Thread()


def launch(name: str, *arguments: Argument) -> None:
    """Calls a function of the library; every native operation goes through here.

    Arguments are as in its signature. A tensor is passed as its address, so that strides are the
    caller's matter; an array likewise; None is the null pointer.
    """
    getattr(native(), name)(*map(address, arguments))
    for listener in _this_thread.listeners:
        listener(name, arguments)


def signature(name: str) -> str:
    """Returns a letter for each argument: p for a pointer, l for a long, i for an int, f for a
    float."""
    return _SIGNATURES[name]


def address(argument: Argument) -> int | float | None:
    """Returns what the library is given for an argument."""
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return argument.buffer_info()[0] if isinstance(argument, array) else argument


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tells a listener of every launch of this thread, after it, until the block ends."""
    _this_thread.listeners.append(listener)
    try:
        yield
    finally:
        _this_thread.listeners.remove(listener)


class Threads(int):
    """How many threads a call should use, and why, so that the number can be computed for other
    work."""

    work: int
    grain: int


def num_threads(work: int, grain: int) -> Threads:
    """Returns how many threads a call should use: torch's number, fewer where each would get
    little.

    Args:
        work: in any unit, such as bytes read.
        grain: what is worth waking a thread for, in the same unit.
    """
    threads = Threads(max(1, min(torch.get_num_threads(), work // grain)))
    threads.work, threads.grain = work, grain
    return threads


@functools.cache
def cache_folder() -> Path:
    """Returns the user's cache folder, or a private temporary one where that cannot be written."""
    folder = Path.home() / ".cache" / "loraplex" / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="loraplex-kernels-"))
