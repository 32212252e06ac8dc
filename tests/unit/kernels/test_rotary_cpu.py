"""The native rotary embedding against the naive one, to the bit."""

import pytest
import torch

from loraplex.kernels.rotary import cpu, naive

pytestmark = pytest.mark.usefixtures("native")

DTYPES = [torch.float32, torch.bfloat16]


def assert_equals_naive(query: torch.Tensor, key: torch.Tensor, width: int) -> None:
    angles = 100 * torch.randn(1, query.shape[2], width // 2).repeat(1, 1, 2)
    cos, sin = angles.cos().to(query.dtype), angles.sin().to(query.dtype)

    got = cpu.rotate(query, key, cos, sin)

    for turned, wanted in zip(got, naive.rotate(query, key, cos, sin), strict=True):
        assert torch.equal(turned, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 9, 300])
@pytest.mark.parametrize(("dim", "width"), [(64, 64), (256, 256), (80, 32), (17, 10), (2, 2)])
def test_every_size(dtype: torch.dtype, tokens: int, dim: int, width: int) -> None:
    query, key = (torch.randn(1, heads, tokens, dim).to(dtype) for heads in (4, 1))

    assert_equals_naive(query, key, width)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_that_are_slices_of_one_projection(dtype: torch.dtype) -> None:
    projected = torch.randn(1, 7, 6, 32).to(dtype)
    query, key = projected[:, :, :4].transpose(1, 2), projected[:, :, 4:].transpose(1, 2)

    assert_equals_naive(query, key, 32)


def test_numbers_that_lie_apart() -> None:
    whole = torch.randn(1, 3, 5, 128)

    assert_equals_naive(whole[..., ::2], whole[:, :1, :, 1::2], 64)


def test_the_tokens_of_the_results_lie_one_after_another() -> None:
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    angles = torch.zeros(1, 5, 8)

    turned = cpu.rotate(query, key, angles, angles)

    assert [x.stride()[1:] for x in turned] == [(8, 48, 1)] * 2
