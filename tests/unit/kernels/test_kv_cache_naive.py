"""Writes to the paged cache hit their slots, and no others."""

import pytest
import torch

from loraplex.kernels.kv_cache.naive import (
    copy_blocks,
    gather_blocks,
    scatter_blocks,
    write_cache,
)

NUM_BLOCKS, HEADS, BLOCK, KEY_DIM, VALUE_DIM = 5, 2, 4, 3, 6


def poisoned(dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((NUM_BLOCKS, HEADS, BLOCK, dim), float("nan"), dtype=dtype)


@pytest.mark.parametrize("slots", [[0], [19], [3, 4], [17, 2, 9, 8, 0], list(range(20))])
def test_each_token_is_found_in_its_slot_and_nothing_else_is_touched(slots: list[int]) -> None:
    caches = poisoned(KEY_DIM), poisoned(VALUE_DIM)
    rows = torch.randn(len(slots), HEADS, KEY_DIM), torch.randn(len(slots), HEADS, VALUE_DIM)

    write_cache(*caches, *rows, torch.tensor(slots))

    for cache, written in zip(caches, rows, strict=True):
        for token, slot in enumerate(slots):
            assert torch.equal(cache[slot // BLOCK, :, slot % BLOCK], written[token])
        unwritten = (NUM_BLOCKS * BLOCK - len(slots)) * HEADS * cache.shape[-1]
        assert int(cache.isnan().sum()) == unwritten


def test_no_tokens_change_nothing() -> None:
    caches = poisoned(KEY_DIM), poisoned(VALUE_DIM)
    rows = torch.empty(0, HEADS, KEY_DIM), torch.empty(0, HEADS, VALUE_DIM)

    write_cache(*caches, *rows, torch.empty(0, dtype=torch.int64))

    assert all(cache.isnan().all() for cache in caches)


def test_values_take_the_caches_type() -> None:
    caches = poisoned(3, torch.bfloat16), poisoned(3, torch.bfloat16)
    rows = torch.randn(1, HEADS, 3)

    write_cache(*caches, rows, rows, torch.tensor([6]))

    assert all(torch.equal(cache[1, :, 2], rows[0].bfloat16()) for cache in caches)


def test_views_into_one_storage_are_written_in_place() -> None:
    size = HEADS * BLOCK * 3
    storage = torch.zeros(NUM_BLOCKS, 2 * size)
    caches = (part.unflatten(1, (HEADS, BLOCK, 3)) for part in storage.split(size, dim=1))
    keys, values = torch.full((1, HEADS, 3), 2.0), torch.full((1, HEADS, 3), 5.0)

    write_cache(*caches, keys, values, torch.tensor([7]))

    assert float(storage[:, :size].sum()) == 2.0 * HEADS * 3
    assert float(storage[:, size:].sum()) == 5.0 * HEADS * 3


def test_blocks_are_copied_whole() -> None:
    storage = torch.randn(NUM_BLOCKS, 6)
    before = storage.clone()

    copy_blocks(storage, torch.tensor([1, 1, 3]), torch.tensor([0, 2, 4]))

    assert torch.equal(storage, before[[1, 1, 1, 3, 3]])


def test_a_copy_has_a_life_of_its_own() -> None:
    storage = torch.zeros(NUM_BLOCKS, 6)
    copy_blocks(storage, torch.tensor([1]), torch.tensor([2]))

    storage[2] = 1.0

    assert float(storage[1].sum()) == 0.0


def test_no_copies_change_nothing() -> None:
    storage = torch.randn(NUM_BLOCKS, 6)
    before = storage.clone()
    none = torch.empty(0, dtype=torch.int64)

    copy_blocks(storage, none, none)

    assert torch.equal(storage, before)


def test_gathered_blocks_come_back_to_where_they_are_scattered() -> None:
    storage = torch.arange(60.0).view(10, 2, 3)
    out, back = torch.zeros(2, 2, 3), torch.zeros(10, 2, 3)
    ids = torch.tensor([7, 2])

    gather_blocks(storage, ids, out)
    scatter_blocks(back, ids, out)

    assert torch.equal(out, torch.stack([storage[7], storage[2]]))
    assert torch.equal(back.nonzero()[:, 0].unique(), torch.tensor([2, 7]))
    assert torch.equal(back[ids], out)


def test_copies_in_a_circle_exchange_blocks() -> None:
    storage = torch.randn(NUM_BLOCKS, 6)
    before = storage.clone()

    copy_blocks(storage, torch.tensor([0, 3]), torch.tensor([3, 0]))

    assert torch.equal(storage, before[[3, 1, 2, 0, 4]])


def test_gathered_blocks_lie_in_the_order_of_their_ids() -> None:
    storage, out = torch.randn(NUM_BLOCKS, 6), torch.full((2, 6), float("nan"))

    gather_blocks(storage, torch.tensor([4, 1]), out)

    assert torch.equal(out, storage[[4, 1]])


def test_scattered_blocks_change_no_other() -> None:
    storage, blocks = torch.zeros(NUM_BLOCKS, 6), torch.ones(2, 6)

    scatter_blocks(storage, torch.tensor([4, 1]), blocks)

    assert storage.sum(1).tolist() == [0, 6, 0, 0, 6]
