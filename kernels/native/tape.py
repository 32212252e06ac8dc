"""Tape: a recorded computation that is played again on the same memory."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from loraplex.kernels.native.library import Argument, address, native, signature

_NUM_INTEGERS, _NUM_FLOATS = 16, 4  # that a function may take, as in tape.cpp


class Call(ctypes.Structure):
    """One call of a function of the library, as tape.cpp reads it."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("integers", ctypes.c_long * _NUM_INTEGERS),
        ("floats", ctypes.c_float * _NUM_FLOATS),
    )

    @classmethod
    def of(cls, name: str, arguments: Sequence[Argument]) -> "Call":
        """Of a launch; what its addresses point to must outlive it."""
        call = cls(ctypes.cast(getattr(native(), name), ctypes.c_void_p))
        num_integers = num_floats = 0
        for letter, argument in zip(signature(name), arguments, strict=True):
            value = address(argument) or 0
            if letter == "f":
                call.floats[num_floats] = value
                num_floats += 1
            else:
                call.integers[num_integers] = int(value)
                num_integers += 1
        return call


@dataclass(frozen=True)
class NativeSegment:
    """Calls of the library one after another: one call from Python."""

    calls: "ctypes.Array[Call]"

    def play(self) -> None:
        native().lpx_play(ctypes.addressof(self.calls), len(self.calls))


@dataclass(frozen=True)
class TorchCall:
    """An operation that has no native form, and where its results belong."""

    operation: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Any  # tensors in the structure of the operation's own; None: it writes in place

    def play(self) -> None:
        fresh = self.operation(*self.args, **self.kwargs)
        if self.results is not None:
            tree_map(_store, self.results, fresh)


def _store(place: Any, fresh: Any) -> None:
    if isinstance(place, Tensor):
        place.copy_(fresh)


@dataclass(frozen=True)
class Tape:
    """What a recorder noted down, in order.

    It reads and writes the memory that the recorded computation did: inputs are refreshed there,
    and the output is there until the next tape on the same arena plays.
    """

    steps: Sequence[NativeSegment | TorchCall]
    output: Tensor
    keeps: Sequence[object]  # alive: the memory behind the addresses of the steps

    def play(self) -> Tensor:
        """Computes anew from what is in the inputs now."""
        for step in self.steps:
            step.play()
        return self.output
