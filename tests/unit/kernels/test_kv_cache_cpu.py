"""Native cache writes against the naive ones."""

import pytest
import torch

from loraplex.kernels.kv_cache import cpu, naive

pytestmark = pytest.mark.usefixtures("native")

NAN = float("nan")


def caches(key_dim: int, value_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[12, 3, 4, D] keys and values, views of one storage full of NaN."""
    split = 3 * 4 * key_dim
    storage = torch.full((12, split + 3 * 4 * value_dim), NAN, dtype=dtype)
    keys = storage[:, :split].unflatten(1, (3, 4, key_dim))
    return keys, storage[:, split:].unflatten(1, (3, 4, value_dim))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (17, 5)])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 48])
def test_rows_land_in_their_slots_and_nowhere_else(
    dtype: torch.dtype, dims: tuple[int, int], num_tokens: int
) -> None:
    keys, values = (torch.randn(3, num_tokens, dim).to(dtype).transpose(0, 1) for dim in dims)
    slots = torch.randperm(48)[:num_tokens]
    want, got = caches(*dims, dtype), caches(*dims, dtype)

    naive.write_cache(*want, keys, values, slots)
    cpu.write_cache(*got, keys, values, slots)

    for wanted, written in zip(want, got, strict=True):
        torch.testing.assert_close(written, wanted, rtol=0, atol=0, equal_nan=True)


def test_rows_are_converted_to_the_format_of_the_cache() -> None:
    key_cache, value_cache = caches(8, 8, torch.bfloat16)
    keys, values = torch.randn(1, 3, 8), torch.randn(1, 3, 8)

    cpu.write_cache(key_cache, value_cache, keys, values, torch.tensor([47]))

    assert torch.equal(key_cache[11, :, 3], keys[0].bfloat16())
    assert torch.equal(value_cache[11, :, 3], values[0].bfloat16())


def test_rows_whose_numbers_lie_apart_are_written_too() -> None:
    key_cache, value_cache = caches(8, 8, torch.float32)
    keys = torch.randn(2, 8, 3).transpose(1, 2)

    cpu.write_cache(key_cache, value_cache, keys, keys, torch.tensor([5, 0]))

    assert torch.equal(key_cache[1, :, 1], keys[0])
    assert torch.equal(value_cache[0, :, 0], keys[1])


def test_slots_that_lie_apart_are_read_in_order() -> None:
    key_cache, value_cache = caches(8, 8, torch.float32)
    keys = torch.randn(2, 3, 8)
    slots = torch.tensor([[5, 40], [0, 41]])[:, 0]

    cpu.write_cache(key_cache, value_cache, keys, keys, slots)

    assert torch.equal(key_cache[1, :, 1], keys[0])
    assert torch.equal(key_cache[0, :, 0], keys[1])
    assert key_cache[10].isnan().all()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_blocks_are_copied_whole(count: int) -> None:
    want, got = (torch.arange(60.0).view(10, 6).clone() for _ in range(2))
    sources, targets = torch.tensor([9, 0, 4][:count]), torch.tensor([1, 8, 2][:count])
    sources, targets = sources.long(), targets.long()

    naive.copy_blocks(want, sources, targets)
    cpu.copy_blocks(got, sources, targets)

    assert torch.equal(got, want)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_a_block_may_be_a_source_and_a_target(order: list[int]) -> None:
    pairs = torch.tensor([(1, 2), (2, 3), (3, 1), (3, 7)])[order]
    want, got = (torch.arange(60.0).view(10, 6).clone() for _ in range(2))

    naive.copy_blocks(want, pairs[:, 0].clone(), pairs[:, 1].clone())
    cpu.copy_blocks(got, pairs[:, 0].clone(), pairs[:, 1].clone())

    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [0, 1, 7])
def test_blocks_go_out_and_come_back(dtype: torch.dtype, count: int) -> None:
    storage = torch.randn(9, 2, 3, 5).to(dtype)[:, 0]  # blocks that lie apart
    before, ids = storage.clone(), torch.randperm(9)[:count]
    want, out = (torch.full((count, 3, 5), NAN, dtype=dtype) for _ in range(2))

    naive.gather_blocks(storage, ids, want)
    cpu.gather_blocks(storage, ids, out)
    storage[ids] = NAN
    cpu.scatter_blocks(storage, ids, out)

    assert torch.equal(out, want)
    assert torch.equal(storage, before)
