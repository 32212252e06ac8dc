"""Sampling helpers in Triton against the naive ones."""

import pytest
import torch
from support.kernels.far_rows import far_apart
from support.kernels.triton_interpreter import DEVICE, INTERPRETED

from loraplex.kernels.sampling import naive
from loraplex.kernels.sampling.triton import argmax

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.device]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PART = 4096  # numbers of a program


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 2, 100, PART, PART + 1, 3 * PART + 7])
def test_every_size(dtype: torch.dtype, vocabulary: int) -> None:
    logits = torch.randn(3, vocabulary).to(DEVICE, dtype)

    assert torch.equal(argmax(logits), naive.argmax(logits))


def test_the_first_of_equals_is_taken_also_where_they_lie_in_different_parts() -> None:
    logits = torch.zeros(3, 3 * PART, device=DEVICE)
    logits[0, [PART - 1, PART, 2 * PART + 3]] = 1.0
    logits[1, [2 * PART + 5, 2 * PART + 3]] = 1.0

    assert argmax(logits).tolist() == [PART - 1, 2 * PART + 3, 0]


def test_infinities_and_nan_are_the_greatest_and_the_least() -> None:
    logits = torch.full((4, PART + 9), float("-inf"), device=DEVICE)
    logits[1, PART + 8] = -1e30
    logits[2, [3, PART + 1]] = torch.tensor([1e30, float("inf")], device=DEVICE)
    logits[3, [3, PART + 1]] = torch.tensor([float("inf"), float("nan")], device=DEVICE)

    assert argmax(logits).tolist() == [0, PART + 8, PART + 1, PART + 1]


def test_no_rows() -> None:
    assert argmax(torch.empty(0, 7, device=DEVICE)).shape == (0,)


def test_views_with_strides_are_read_in_place() -> None:
    logits = torch.randn(300, 4).to(DEVICE).t()[::2, ::3]

    assert torch.equal(argmax(logits), naive.argmax(logits))


@pytest.mark.skipif(not INTERPRETED, reason="maps memory that it never touches")
def test_rows_and_columns_may_lie_further_apart_than_an_int32_counts() -> None:
    logits = torch.tensor([[1, 3, 2], [6, 5, 4], [7, 8, 9]], dtype=torch.float16)

    assert argmax(far_apart(logits)).tolist() == [1, 0, 2]
    assert argmax(far_apart(logits.t()).t()).tolist() == [1, 0, 2]
