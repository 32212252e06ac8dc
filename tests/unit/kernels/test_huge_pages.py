"""Pieces of one mapping in large pages."""

import gc
import sys

import psutil
import pytest
import torch

from loraplex.kernels.native.huge_pages import HugePageChunks, HugePages, populate


def test_pieces_do_not_overlap_and_begin_on_cache_lines() -> None:
    memory = HugePages(1000)
    pieces = [memory.empty(3, 5, dtype=torch.bfloat16), memory.empty(7, dtype=torch.float32)]
    for value, piece in enumerate(pieces):
        piece.fill_(value)

    assert [piece.data_ptr() % 64 for piece in pieces] == [0, 0]
    assert [piece.unique().tolist() for piece in pieces] == [[0], [1]]


def test_a_piece_outlives_what_it_came_from() -> None:
    piece = HugePages(1 << 20).empty(1 << 18, dtype=torch.float32)
    gc.collect()

    assert piece.fill_(1.0).sum() == 1 << 18


def test_an_empty_piece_takes_no_room() -> None:
    assert HugePages(0).empty(0, 4, dtype=torch.float32).shape == (0, 4)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="no room for 8000000 bytes after 0"):
        HugePages(1000).empty(2_000_000, dtype=torch.float32)


def test_pieces_of_chunks_do_not_overlap_and_may_be_larger_than_a_chunk() -> None:
    chunks = HugePageChunks(5 << 20)
    pieces = [chunks.empty(size, dtype=torch.float32) for size in (7, 2 << 20, 1, 4 << 20, 3)]
    for value, piece in enumerate(pieces):
        piece.fill_(value)

    assert [piece.unique().tolist() for piece in pieces] == [[0], [1], [2], [3], [4]]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can")
def test_populated_memory_is_resident_before_its_first_write() -> None:
    piece = HugePages(64 << 20).empty(64 << 20, dtype=torch.uint8)
    before = psutil.Process().memory_info().rss
    populate(piece)

    assert psutil.Process().memory_info().rss - before >= 60 << 20
