"""Tensors of more than 2**31 numbers. Their memory is never touched but where a kernel works."""

import pytest
import torch
from support.kernels.paged import Layout, paged_batch
from support.kernels.triton_interpreter import DEVICE
from torch import Tensor

from loraplex.kernels.attention.spans import QuerySpans
from loraplex.kernels.attention.triton import paged_attention
from loraplex.kernels.kv_cache.triton import copy_blocks, gather_blocks, write_cache

pytestmark = pytest.mark.device

HEADS, SIZE, DIM = 2, 16, 64
BLOCK = HEADS * SIZE * DIM  # numbers in the keys, or in the values, of one block


def huge(row: int) -> Tensor:
    """[N, row], of which the last rows lie beyond the reach of 32 bits."""
    return torch.empty(2**31 // row + 16, row, dtype=torch.bfloat16, device=DEVICE)


def huge_caches() -> tuple[Tensor, Tensor]:
    keys, values = huge(2 * BLOCK).split(BLOCK, dim=1)
    return keys.unflatten(1, (HEADS, SIZE, DIM)), values.unflatten(1, (HEADS, SIZE, DIM))


def ids(*blocks: int) -> Tensor:
    return torch.tensor(blocks, device=DEVICE)


def test_attention_reads_the_highest_blocks() -> None:
    keys, values = huge_caches()
    batch = paged_batch(Layout(4, HEADS, DIM, DIM, dtype=torch.bfloat16), [150], [1]).to(DEVICE)
    moved = ids(*(len(keys) - 1 - i for i in range(10)))
    keys[moved] = batch.key_cache[batch.block_tables[0]]
    values[moved] = batch.value_cache[batch.block_tables[0]]
    want = paged_attention(*batch.arguments, 0.2)

    for table in (moved, moved.to(torch.int32)):
        got = paged_attention(batch.query, keys, values, table[None], batch.spans, 0.2)
        assert torch.equal(got, want)


def test_attention_reads_and_writes_the_highest_rows() -> None:
    batch = paged_batch(Layout(4, HEADS, DIM, DIM, dtype=torch.bfloat16), [50], [1]).to(DEVICE)
    query = huge(4 * DIM).unflatten(1, (4, DIM))
    query[-1] = batch.query[0]
    last = QuerySpans.of([len(query) - 1, len(query)], [50], DEVICE)

    got = paged_attention(query, *batch.arguments[1:4], last, 0.2)

    assert torch.equal(got[-1:], paged_attention(*batch.arguments, 0.2))


def test_cache_writes_reach_the_highest_slots() -> None:
    keys, values = huge_caches()
    rows = torch.randn(1, HEADS, DIM).bfloat16().to(DEVICE)

    write_cache(keys, values, rows, -rows, ids(len(keys) * SIZE - 1))

    assert torch.equal(keys[-1, :, -1], rows[0])
    assert torch.equal(values[-1, :, -1], -rows[0])


def test_the_highest_blocks_are_copied_and_gathered() -> None:
    storage = huge(BLOCK)
    last = len(storage) - 1
    storage[last] = torch.randn(BLOCK).to(storage)
    out = torch.zeros(1, BLOCK, dtype=torch.bfloat16, device=DEVICE)

    copy_blocks(storage, ids(last), ids(last - 1))
    gather_blocks(storage, ids(last - 1), out)

    assert torch.equal(out[0], storage[last])
