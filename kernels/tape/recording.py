"""Recording: what a computation did at one choice of its sizes, step by step.

Whole numbers are kept apart from the steps, which refer to them by their place. So the recordings
of one computation at several sizes have equal steps, and their numbers determine those at any other
sizes.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from loraplex.kernels.native.library import Argument, Threads, signature
from loraplex.kernels.tape.tracked_allocator import TrackedAllocator

_SMALL = 4096  # bytes of a constant that a computation may make anew each time


@dataclass(frozen=True)
class Number:
    place: int  # among the recording's numbers


@dataclass(frozen=True)
class NumberList:
    """Numbers side by side, of which a launch gets the address."""

    place: int  # of the first
    length: int


@dataclass(frozen=True)
class ThreadCount:
    """As many threads as the work is worth."""

    work: int  # its place among the numbers
    grain: int


@dataclass(frozen=True)
class Allocation:
    """Memory that was allocated while recording."""

    number: int


@dataclass(frozen=True, eq=False)
class Outside:
    """Memory that existed before, or a constant that is made anew each time."""

    tensor: Tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Outside):
            return False
        mine, theirs = self.tensor.untyped_storage(), other.tensor.untyped_storage()
        if mine.data_ptr() == theirs.data_ptr():
            return True
        return mine.nbytes() == theirs.nbytes() <= _SMALL and bytes(mine) == bytes(theirs)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Address:
    memory: Allocation | Outside
    offset: int  # in bytes; its place among the numbers


@dataclass(frozen=True)
class View:
    """A tensor."""

    memory: Allocation | Outside
    dtype: torch.dtype
    layout: int  # place of its offset, in numbers of its dtype; then come its shape and its strides
    num_dims: int


Operand: TypeAlias = Number | NumberList | ThreadCount | Address | float | None


@dataclass(frozen=True)
class Launch:
    """One call of a function of the library."""

    name: str
    operands: tuple[Operand, ...]


@dataclass(frozen=True)
class TorchOperation:
    """An operation that has no native form; tensors are `View`s, whole numbers `Number`s."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: Any  # in the structure of the operation's own; None: it writes in place


@dataclass(frozen=True)
class Recording:
    steps: list[Launch | TorchOperation]
    output: View
    allocations: list[Number]  # bytes of each
    numbers: list[int] = field(compare=False)


class Trace:
    """Collects the steps of one recording."""

    def __init__(self, allocator: TrackedAllocator) -> None:
        self._allocator = allocator
        self._steps: list[Launch | TorchOperation] = []
        self._numbers: list[int] = []

    def mark(self) -> tuple[int, int]:
        """Returns the current position, for `forget`."""
        return len(self._steps), len(self._numbers)

    def forget(self, mark: tuple[int, int]) -> None:
        """Forgets everything recorded after a mark."""
        del self._steps[mark[0] :], self._numbers[mark[1] :]

    def launch(self, name: str, arguments: tuple[Argument, ...]) -> None:
        letters = signature(name)
        operands = tuple(map(self._operand, letters, arguments))
        self._steps.append(Launch(name, operands))

    def torch_operation(
        self, function: Callable[..., Any], args: Any, kwargs: Any, results: Any
    ) -> None:
        args, kwargs, results = (tree_map(self._leaf, part) for part in (args, kwargs, results))
        self._steps.append(TorchOperation(function, args, kwargs, results))

    def finish(self, output: Tensor) -> Recording:
        view = self.view(output)
        allocations = [self._number(size) for size in self._allocator.sizes]
        return Recording(self._steps, view, allocations, self._numbers)

    def view(self, tensor: Tensor) -> View:
        layout = self._note(int(tensor.storage_offset()), *tensor.shape, *tensor.stride())
        return View(self._memory(tensor), tensor.dtype, layout, tensor.dim())

    def _operand(self, letter: str, argument: Argument) -> Operand:
        match argument:
            case int() | float() if letter == "f":
                return float(argument)
            case Tensor():
                offset = int(argument.storage_offset()) * argument.element_size()
                return Address(self._memory(argument), self._note(offset))
            case array():
                return NumberList(self._note(*argument), len(argument))
            case Threads():
                return ThreadCount(self._note(argument.work), argument.grain)
            case int():
                return self._number(argument)
            case _:
                return None

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.view(value)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return self._number(value) if is_number else value

    def _memory(self, tensor: Tensor) -> Allocation | Outside:
        number = self._allocator.number_of(tensor)
        return Outside(tensor) if number is None else Allocation(number)

    def _number(self, value: int) -> Number:
        return Number(self._note(value))

    def _note(self, *values: int) -> int:
        self._numbers += values
        return len(self._numbers) - len(values)
