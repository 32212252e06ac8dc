"""Triton's cache writes against the naive ones."""

import pytest
import torch
from support.kernels.triton_interpreter import DEVICE
from torch import Tensor

from loraplex.kernels.kv_cache import naive, triton

pytestmark = pytest.mark.device

NAN = float("nan")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def caches(key_dim: int, value_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[12, 3, 4, D] keys and values, views of one storage full of NaN."""
    split = 3 * 4 * key_dim
    storage = torch.full((12, split + 3 * 4 * value_dim), NAN, dtype=dtype, device=DEVICE)
    keys = storage[:, :split].unflatten(1, (3, 4, key_dim))
    return keys, storage[:, split:].unflatten(1, (3, 4, value_dim))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def ids(*blocks: int) -> Tensor:
    return torch.tensor(blocks, dtype=torch.int64, device=DEVICE)


def assert_same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (17, 5), (512, 64)])
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_rows_land_in_their_slots_and_nowhere_else(
    dtype: torch.dtype, dims: tuple[int, int], num_tokens: int
) -> None:
    keys, values = (numbers(3, num_tokens, dim).to(dtype).transpose(0, 1) for dim in dims)
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(1))[:num_tokens].to(DEVICE)
    want, got = caches(*dims, dtype), caches(*dims, dtype)

    naive.write_cache(*want, keys, values, slots)
    triton.write_cache(*got, keys, values, slots)

    assert_same(got[0], want[0])
    assert_same(got[1], want[1])


def test_rows_of_padding_are_written_nowhere() -> None:
    want, got = caches(8, 8, torch.float32), caches(8, 8, torch.float32)
    rows = numbers(4, 3, 8)

    naive.write_cache(*want, rows[2:3], rows[2:3], ids(47))
    triton.write_cache(*got, rows, rows, ids(-1, -1, 47, -1))

    assert_same(got[0], want[0])
    assert_same(got[1], want[1])


def test_rows_are_converted_to_the_format_of_the_cache() -> None:
    key_cache, value_cache = caches(8, 8, torch.bfloat16)
    rows = numbers(1, 3, 8)

    triton.write_cache(key_cache, value_cache, rows, rows, ids(47))

    assert torch.equal(key_cache[11, :, 3], rows[0].bfloat16())
    assert torch.equal(value_cache[11, :, 3], rows[0].bfloat16())


def test_rows_and_slots_that_lie_apart_are_written_too() -> None:
    key_cache, value_cache = caches(8, 8, torch.float32)
    rows = numbers(2, 8, 3).transpose(1, 2)
    slots = ids(5, 40, 0, 41).view(2, 2)[:, 0]

    triton.write_cache(key_cache, value_cache, rows, rows, slots)

    assert torch.equal(key_cache[1, :, 1], rows[0])
    assert torch.equal(value_cache[0, :, 0], rows[1])
    assert key_cache[10].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("size", [6, 2049])
def test_blocks_are_copied_whole(dtype: torch.dtype, count: int, size: int) -> None:
    want = numbers(10, size).to(dtype)
    got = want.clone()
    sources, targets = ids(9, 0, 4)[:count], ids(1, 8, 2)[:count]

    naive.copy_blocks(want, sources, targets)
    triton.copy_blocks(got, sources, targets)

    assert torch.equal(got, want)


def test_copies_in_a_circle_exchange_blocks() -> None:
    storage = numbers(5, 6)
    before = storage.clone()

    triton.copy_blocks(storage, ids(0, 3), ids(3, 0))

    assert torch.equal(storage, before[[3, 1, 2, 0, 4]])


@pytest.mark.parametrize("shape", [(6,), (2, 3, 5), (2049,)])
def test_gathered_blocks_come_back_to_where_they_are_scattered(shape: tuple[int, ...]) -> None:
    storage = numbers(10, *shape)
    out = torch.full((3, *shape), NAN, device=DEVICE)
    back = torch.full_like(storage, NAN)

    triton.gather_blocks(storage, ids(9, 0, 4), out)
    triton.scatter_blocks(back, ids(9, 0, 4), out)

    assert torch.equal(out, storage[[9, 0, 4]])
    assert torch.equal(back[[9, 0, 4]], storage[[9, 0, 4]])
    assert back[[1, 2, 3, 5, 6, 7, 8]].isnan().all()
