"""The plain linear: torch's own product, a row of which does not depend on the others."""

import pytest
import torch

from loraplex.kernels.linear.naive import TILE, linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0,), (1,), (TILE,), (2, TILE + 1)])
def test_it_computes_what_torch_does(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(*shape, 70).to(dtype), torch.randn(33, 70).to(dtype)
    bias = torch.randn(33)

    out = linear(x, weight, bias)

    want = torch.nn.functional.linear(x, weight, bias.to(dtype))
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
    assert out.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(640, 2048), (320, 640), (33, 77)])
def test_a_row_has_the_same_bits_in_any_number_of_rows(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x, weight = torch.randn(67, shape[1]).to(dtype), torch.randn(shape).to(dtype)
    together = linear(x, weight)

    for first, end in ((0, 1), (1, 2), (5, 30), (50, 67), (66, 67)):
        assert torch.equal(linear(x[first:end], weight), together[first:end])
