"""Gated activations in Triton against the naive ones."""

import pytest
import torch
from support.kernels.far_rows import far_apart
from support.kernels.triton_interpreter import DEVICE, INTERPRETED

from loraplex.kernels.gated_activation import naive, triton

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.device]

NAMES = ["gated_silu", "gated_gelu_tanh"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(33,), (0, 8), (1, 1030), (2, 3, 17)])
def test_every_size(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (4 * torch.randn(*shape[:-1], 2 * shape[-1])).to(DEVICE, dtype)

    got = getattr(triton, name)(x)

    assert got.dtype == dtype
    rtol = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(got, getattr(naive, name)(x), rtol=rtol, atol=1e-3 * rtol + 4e-6)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_wider_tensor_are_read_in_place(name: str) -> None:
    x = torch.randn(5, 100).to(DEVICE)[:, 7:47]

    torch.testing.assert_close(getattr(triton, name)(x), getattr(naive, name)(x))


@pytest.mark.parametrize("name", NAMES)
def test_the_ends_of_the_range(name: str) -> None:
    gate = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4])
    x = torch.cat([gate, torch.ones(7)]).to(DEVICE)

    torch.testing.assert_close(
        getattr(triton, name)(x), getattr(naive, name)(x), rtol=1e-5, atol=1e-6
    )


@pytest.mark.skipif(not INTERPRETED, reason="maps memory that it never touches")
def test_rows_may_lie_further_apart_than_an_int32_counts() -> None:
    near = torch.randn(3, 32, dtype=torch.float16)

    assert torch.equal(triton.gated_silu(far_apart(near)), triton.gated_silu(near))
