"""The native argmax against torch's."""

import pytest
import torch

from loraplex.kernels.sampling.cpu import argmax

pytestmark = pytest.mark.usefixtures("native")

DTYPES = [torch.float32, torch.bfloat16]
COLUMNS = [1, 2, 15, 17, 255, 256, 257, 16384, 16385, 40000]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_every_size(columns: int, dtype: torch.dtype) -> None:
    logits = torch.randn(5, columns, generator=torch.Generator().manual_seed(columns)).to(dtype)

    assert torch.equal(argmax(logits), logits.argmax(dim=-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 1, 300, 16383, 16384, 39999])
def test_of_equals_the_first_is_taken(place: int, dtype: torch.dtype) -> None:
    logits = torch.zeros(1, 40000, dtype=dtype)
    logits[0, place:] = 3

    assert argmax(logits).tolist() == [place]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 299, 16384, 39998])
def test_a_nan_is_the_greatest_and_the_first_one_counts(place: int, dtype: torch.dtype) -> None:
    logits = torch.randn(1, 40000).to(dtype)
    logits[0, [place, 39999]] = float("nan")
    logits[0, 500] = float("inf")

    assert argmax(logits).tolist() == [place]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_which_nothing_is_left(dtype: torch.dtype) -> None:
    assert argmax(torch.full((2, 600), float("-inf"), dtype=dtype)).tolist() == [0, 0]


def test_banned_tokens_beside_others() -> None:
    logits = torch.full((1, 600), float("-inf"))
    logits[0, 555] = -1e30

    assert argmax(logits).tolist() == [555]


def test_rows_that_lie_apart() -> None:
    logits = torch.randn(6, 1000)[::2, :700]

    assert torch.equal(argmax(logits), logits.argmax(dim=-1))


def test_no_rows() -> None:
    assert argmax(torch.empty(0, 50)).shape == (0,)
