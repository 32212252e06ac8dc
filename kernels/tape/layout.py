"""Lays out the buffers of a recorded computation in one piece of memory."""

from collections.abc import Sequence
from dataclasses import dataclass

_LINE = 64  # bytes; buffers begin at a multiple


@dataclass(frozen=True)
class Buffer:
    num_bytes: int
    first: int  # the first step that uses it
    last: int  # the last one


@dataclass(frozen=True)
class Layout:
    offsets: list[int]  # bytes, by buffer
    num_bytes: int  # of all


def lay_out(buffers: Sequence[Buffer]) -> Layout:
    """Places buffers so that those in use at the same step do not overlap; each takes the first gap
    available when it comes into use."""
    offsets = [0] * len(buffers)
    num_bytes = 0
    placed: list[tuple[int, int, int]] = []  # in use: begin, end, last step; ascending
    for index in sorted(range(len(buffers)), key=lambda i: buffers[i].first):
        buffer = buffers[index]
        placed = [place for place in placed if place[2] >= buffer.first]
        size = -(-buffer.num_bytes // _LINE) * _LINE
        offset = _first_gap(placed, size)
        offsets[index] = offset
        num_bytes = max(num_bytes, offset + size)
        placed.append((offset, offset + size, buffer.last))
        placed.sort()
    return Layout(offsets, num_bytes)


def _first_gap(placed: list[tuple[int, int, int]], size: int) -> int:
    offset = 0
    for begin, end, _ in placed:
        if begin - offset >= size:
            break
        offset = max(offset, end)
    return offset
