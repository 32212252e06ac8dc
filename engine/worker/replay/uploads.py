"""Uploads: copies a step's inputs from the host to a GPU in one piece."""

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.kernels.pinned_memory import pinned

_ALIGNMENT = 8  # bytes, of every part
_IN_TURN = 2  # pieces of pinned memory: one is filled while the other may still be read


class Uploads:
    """Arrays and their target tensors, in the order of the device's work.

    A step's arrays lie side by side in pinned memory, cross the bus in one asynchronous copy, and
    are spread on the device from there, whatever the layout of their targets.
    """

    def __init__(self, device: torch.device, make_event: Callable[[], Any] | None = None) -> None:
        self._device = device
        self._num_bytes = 0
        make = make_event or torch.cuda.Event
        self._events = [make() for _ in range(_IN_TURN)]  # the copy has been read, by turn
        self._hosts: list[Tensor] = []  # by turn: [bytes] uint8
        self._staged = torch.empty(0, dtype=torch.uint8, device=device)  # the same on the device
        self._turn = 0
        self._end = 0
        self._parts: list[tuple[int, Tensor]] = []  # where each begins, and where it goes

    def reserve(self, num_bytes: int) -> None:
        """Reserves a part of so many bytes in each step; called before the first step."""
        self._num_bytes += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

    def add(self, source: NDArray[Any], target: Tensor) -> None:
        """Copies an array now; it reaches its target, of the same shape and format, by `send`."""
        if not self._parts:
            self._begin()
        start, self._end = self._end, self._end + -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT
        part = self._hosts[self._turn].numpy()[start : start + source.nbytes]
        part.view(source.dtype).reshape(source.shape)[...] = source
        self._parts.append((start, target))

    def send(self) -> None:
        """Sends everything that was added since the last call."""
        if not self._parts:
            return
        staged = self._staged[: self._end]
        staged.copy_(self._hosts[self._turn][: self._end], non_blocking=True)
        self._events[self._turn].record()
        for start, target in self._parts:
            part = staged[start : start + target.numel() * target.element_size()]
            target.copy_(part.view(target.dtype).view(target.shape))
        self._turn = (self._turn + 1) % _IN_TURN
        self._end = 0
        self._parts = []

    def _begin(self) -> None:
        if not self._hosts:
            size = (self._num_bytes,)
            self._hosts = [pinned(*size, dtype=torch.uint8) for _ in range(_IN_TURN)]
            self._staged = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._events[self._turn].synchronize()  # the last step but one has read it
