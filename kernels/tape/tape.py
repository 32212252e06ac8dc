"""Tape: a recorded computation, played at any sizes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from loraplex.kernels.native.library import native
from loraplex.kernels.tape.affine import Affine, Sizes
from loraplex.kernels.tape.calls import CallList
from loraplex.kernels.tape.layout import Buffer, lay_out
from loraplex.kernels.tape.recording import (
    Address,
    Allocation,
    Launch,
    Number,
    Recording,
    TorchOperation,
    View,
)


@dataclass(frozen=True)
class NativeSegment:
    """Calls of the library one after another: one call from Python."""

    address: int  # of the first
    num_calls: int

    def play(self) -> None:
        native().lpx_play(self.address, self.num_calls)


@dataclass(frozen=True)
class TorchCall:
    """An operation that has no native form, and where its results belong."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: Any  # tensors in the structure of the operation's own; None: it writes in place

    def play(self) -> None:
        fresh = self.function(*self.args, **self.kwargs)
        if self.results is not None:
            tree_map(_store, self.results, fresh)


class Tape:
    """Plays what was recorded, at any sizes.

    It reads its inputs where the recorded computation did, so they are refreshed there.
    Intermediate results lie in one arena, laid out for the largest sizes; a page of it takes no
    memory before it is used.
    """

    def __init__(self, recording: Recording, numbers: Affine, limits: Sizes) -> None:
        """`numbers`: those of the recording at any sizes. `limits`: the largest sizes."""
        self._recording = recording
        self._numbers = numbers
        layout = lay_out(_buffers(recording, numbers.at(limits).tolist()))
        self.arena = torch.empty(layout.num_bytes, dtype=torch.uint8)
        self._offsets = layout.offsets
        launches = [step for step in recording.steps if isinstance(step, Launch)]
        self._calls = CallList(launches, numbers, self._address_of)
        self._sizes: Sizes = ()
        self._steps: list[NativeSegment | TorchCall] = []
        self._output = self.arena

    @property
    def steps(self) -> list[NativeSegment | TorchCall]:
        """Returns the steps as they were played last."""
        return self._steps

    def play(self, sizes: Sizes) -> Tensor:
        """Computes anew from the current inputs.

        Returns:
            The output; it is there until the tape plays again.
        """
        if sizes != self._sizes or not self._steps:
            self._set(sizes)
        for step in self._steps:
            step.play()
        return self._output

    def _set(self, sizes: Sizes) -> None:
        self._calls.set(sizes)
        numbers = self._numbers.at(sizes).tolist()

        def value(leaf: Any) -> Any:
            if isinstance(leaf, View):
                return self._tensor(leaf, numbers)
            return numbers[leaf.place] if isinstance(leaf, Number) else leaf

        self._steps = []
        num_calls = done = 0
        for step in [*self._recording.steps, None]:
            if isinstance(step, Launch):
                num_calls += 1
                continue
            if num_calls > done:
                self._steps.append(NativeSegment(self._calls.address(done), num_calls - done))
                done = num_calls
            if step is not None:
                parts = (step.args, step.kwargs, step.results)
                self._steps.append(TorchCall(step.function, *tree_map(value, parts)))
        self._output = self._tensor(self._recording.output, numbers)
        self._sizes = sizes

    def _address_of(self, address: Address) -> int:
        match address.memory:
            case Allocation(number):
                return self.arena.data_ptr() + self._offsets[number]
            case outside:
                return outside.tensor.untyped_storage().data_ptr()

    def _tensor(self, view: View, numbers: list[int]) -> Tensor:
        offset, *layout = numbers[view.layout : view.layout + 1 + 2 * view.num_dims]
        shape, strides = layout[: view.num_dims], layout[view.num_dims :]
        match view.memory:
            case Allocation(number):
                flat = self.arena.view(view.dtype)
                offset += self._offsets[number] // view.dtype.itemsize
            case outside:
                flat = outside.tensor
        return flat.as_strided(shape, strides, offset)


def _buffers(recording: Recording, numbers: list[int]) -> list[Buffer]:
    """Returns the buffer of each allocation, at the sizes to which the numbers belong."""
    uses: dict[int, list[int]] = {}
    for index, step in enumerate(recording.steps):
        for allocation in _allocations_of(step):
            uses.setdefault(allocation, []).append(index)
    if isinstance(recording.output.memory, Allocation):
        uses.setdefault(recording.output.memory.number, []).append(len(recording.steps))
    return [
        Buffer(numbers[size.place], uses[number][0], uses[number][-1])
        if number in uses
        else Buffer(0, 0, 0)
        for number, size in enumerate(recording.allocations)
    ]


def _allocations_of(step: Launch | TorchOperation) -> list[int]:
    if isinstance(step, Launch):
        leaves: list[Any] = list(step.operands)
    else:
        leaves = tree_leaves((step.args, step.kwargs, step.results))
    memories = [leaf.memory for leaf in leaves if isinstance(leaf, Address | View)]
    return [memory.number for memory in memories if isinstance(memory, Allocation)]


def _store(place: Any, fresh: Any) -> None:
    if isinstance(place, Tensor):
        place.copy_(fresh)
