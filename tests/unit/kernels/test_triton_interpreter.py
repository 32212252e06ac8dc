"""Triton's interpreter, as set up for these tests, computes what a GPU computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from support.kernels.triton_interpreter import DEVICE, INTERPRETED, bfloat16_bits, bfloat16_values
from torch import Tensor

pytestmark = pytest.mark.device

NAN, INF = float("nan"), float("inf")
SIZE = 64


@triton.jit
def arithmetic_kernel(a, b, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(out + at, tl.where(x > y, x * y, x + y))


@triton.jit
def dot_kernel(a, b, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    grid = at[:, None] * SIZE + at[None, :]
    tl.store(out + grid, tl.dot(tl.load(a + grid), tl.load(b + grid)).to(out.dtype.element_ty))


@triton.jit
def total_kernel(a, out, length, SIZE: tl.constexpr, STEP: tl.constexpr):
    total = 0.0
    for start in tl.range(0, length, STEP):
        at = start + tl.arange(0, STEP)
        total += tl.sum(tl.load(a + at, mask=at < length, other=0.0).to(tl.float32), 0)
    tl.store(out, total)


@triton.jit
def bfloat16_total_kernel(a, out, SIZE: tl.constexpr):
    tl.store(out, tl.reduce(tl.load(a + tl.arange(0, SIZE)), 0, _add))


@triton.jit
def _add(x, y):
    return x + y


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4e38, 1e-40, -0.0, INF, -INF, NAN])
    values = torch.cat([ties, numbers(0, 4096).cpu()])

    bits = torch.from_numpy(bfloat16_bits(values.numpy()).view("int16"))

    want = values.to(torch.bfloat16)
    torch.testing.assert_close(bits.view(torch.bfloat16), want, rtol=0, atol=0, equal_nan=True)
    values_again = torch.from_numpy(bfloat16_values(bits.numpy().view("uint16")))
    torch.testing.assert_close(values_again, want.float(), rtol=0, atol=0, equal_nan=True)


def test_bfloat16_is_compared_added_and_multiplied_by_value() -> None:
    a, b = numbers(1, SIZE).bfloat16(), numbers(2, SIZE).bfloat16()
    out = torch.full_like(a, NAN)

    arithmetic_kernel[(1,)](a, b, out, SIZE)

    assert torch.equal(out, torch.where(a > b, a * b, a + b))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_halves_are_summed_in_float32(dtype: torch.dtype) -> None:
    a, b = numbers(3, SIZE, SIZE).to(dtype), numbers(4, SIZE, SIZE).to(dtype)
    out = torch.full_like(a, NAN, dtype=torch.float32)

    dot_kernel[(1,)](a, b, out, SIZE)

    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, SIZE])
def test_a_loop_may_be_as_long_as_an_argument_says(length: int) -> None:
    a, out = numbers(5, SIZE).bfloat16(), torch.full((1,), NAN, device=DEVICE)

    total_kernel[(1,)](a, out, length, SIZE, 16)

    torch.testing.assert_close(out[0], a[:length].float().sum())


@pytest.mark.skipif(not INTERPRETED, reason="a GPU does it, in an order of its own")
def test_sums_in_bfloat16_are_refused() -> None:
    launch: Callable[..., Any] = bfloat16_total_kernel[(1,)]

    with pytest.raises(Exception, match="reduce in float32"):
        launch(numbers(6, SIZE).bfloat16(), torch.zeros(1), SIZE)
