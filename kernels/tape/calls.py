"""CallList: launches of the library as tape.cpp reads them, at any sizes."""

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from loraplex.kernels.native.library import native, signature
from loraplex.kernels.tape.affine import Affine, Sizes
from loraplex.kernels.tape.recording import (
    Address,
    Launch,
    Number,
    NumberList,
    Operand,
    ThreadCount,
)

_INTEGERS, _FLOATS = 16, 4  # that a call has room for, as in tape.cpp
_WORDS = 1 + _INTEGERS + _FLOATS // 2  # of eight bytes: the function, integers, floats by pairs


class CallList:
    """Calls one after another in memory, followed by the lists of numbers that they point to.

    Each whole number is a word of this memory. When the sizes change, only the words that depend on
    them are rewritten, all at once.
    """

    def __init__(
        self, launches: Sequence[Launch], numbers: Affine, address_of: Callable[[Address], int]
    ) -> None:
        """`address_of`: returns where the memory of an address begins, without its offset."""
        writer = _Writer(launches, address_of)
        self._words = writer.words
        self._native = native()  # alive, as are the functions in it
        found = _table(writer.found)
        affine = numbers.select(found[:, 1]).plus(found[:, 2])
        self._words[found[:, 0]] = affine.coefficients[:, 0]
        self._varying = found[affine.varies, 0]
        self._numbers = affine.select(affine.varies)
        threads = _table(writer.threads)
        self._thread_words, self._grains = threads[:, 0], threads[:, 2]
        self._work = numbers.select(threads[:, 1])

    def address(self, index: int) -> int:
        """Returns the address of a call, for `lpx_play`."""
        return self._words.data_ptr() + index * _WORDS * self._words.itemsize

    def set(self, sizes: Sizes) -> None:
        self._words[self._varying] = self._numbers.at(sizes)
        threads = self._work.at(sizes) // self._grains
        self._words[self._thread_words] = threads.clamp(1, torch.get_num_threads())


class _Writer:
    """Writes what is the same at all sizes, and records where the rest belongs."""

    def __init__(self, launches: Sequence[Launch], address_of: Callable[[Address], int]) -> None:
        operands = [operand for launch in launches for operand in launch.operands]
        listed = sum(o.length for o in operands if isinstance(o, NumberList))
        self._end = _WORDS * len(launches)
        self.words = torch.zeros(self._end + listed, dtype=torch.int64)
        self._floats = self.words.view(torch.float32)
        self.found: list[tuple[int, int, int]] = []  # word, place of a number, what to add to it
        self.threads: list[tuple[int, int, int]] = []  # word, place of the work, grain
        self._address_of = address_of
        for index, launch in enumerate(launches):
            self._write(_WORDS * index, launch)

    def _write(self, word: int, launch: Launch) -> None:
        function = getattr(native(), launch.name)
        self.words[word] = ctypes.cast(function, ctypes.c_void_p).value or 0
        integers = word + 1
        floats = 2 * (integers + _INTEGERS)
        for letter, operand in zip(signature(launch.name), launch.operands, strict=True):
            if letter == "f" and isinstance(operand, float):
                self._floats[floats] = operand
                floats += 1
            else:
                self._write_integer(integers, operand)
                integers += 1

    def _write_integer(self, word: int, operand: Operand) -> None:
        match operand:
            case Number(place):
                self.found.append((word, place, 0))
            case ThreadCount(work, grain):
                self.threads.append((word, work, grain))
            case Address(_, offset):
                self.found.append((word, offset, self._address_of(operand)))
            case NumberList(place, length):
                self.words[word] = self.words.data_ptr() + self._end * self.words.itemsize
                self.found += [(self._end + i, place + i, 0) for i in range(length)]
                self._end += length
            case None:
                pass  # the null pointer


def _table(rows: list[tuple[int, int, int]]) -> Tensor:
    """[N, 3] int64"""
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)
