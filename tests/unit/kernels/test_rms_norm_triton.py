"""Root mean square normalisation in Triton against the naive one."""

import pytest
import torch
from support.kernels.far_rows import far_apart
from support.kernels.triton_interpreter import DEVICE, INTERPRETED

from loraplex.kernels.rms_norm import naive, triton

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.device]

NAMES = ["rms_norm", "rms_norm_rounding_first"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_equals_naive(name: str, x: torch.Tensor) -> None:
    weight = torch.randn(x.shape[-1]).to(DEVICE)
    want = getattr(naive, name)(x, weight, 1e-6)

    got = getattr(triton, name)(x, weight, 1e-6)

    assert got.dtype == x.dtype
    # Sums in another order may fall on the other side of a rounding border, once or twice.
    rtol = 1e-5 if x.dtype == torch.float32 else 2 * torch.finfo(x.dtype).eps
    torch.testing.assert_close(got, want, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "columns"), [(0, 8), (1, 1), (7, 100), (3, 640), (2, 2049)])
def test_every_size(name: str, dtype: torch.dtype, rows: int, columns: int) -> None:
    assert_equals_naive(name, torch.randn(rows, columns).to(DEVICE, dtype))


@pytest.mark.parametrize("name", NAMES)
def test_each_form_rounds_where_the_naive_one_does(name: str) -> None:
    x, weight = torch.randn(50, 64).to(DEVICE, torch.bfloat16), torch.randn(64).to(DEVICE)

    got = getattr(triton, name)(x, weight, 1e-6)

    same = got == getattr(naive, name)(x, weight, 1e-6)
    assert same.float().mean() > 0.98  # where a form rounds elsewhere, every sixth number differs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("view", ["heads", "batches", "columns apart", "vector"])
def test_views_with_strides(name: str, view: str) -> None:
    whole = torch.randn(2, 5, 4, 66).to(DEVICE)
    views = {
        "heads": whole[:1, :, :3].transpose(1, 2),  # as a projection's heads
        "batches": whole.transpose(1, 2),
        "columns apart": whole[0, ..., ::2],
        "vector": whole[0, 0, 0],
    }
    assert_equals_naive(name, views[view])


def test_a_row_of_zeros_stays_zero() -> None:
    zeros, weight = torch.zeros(2, 20, device=DEVICE), torch.ones(20, device=DEVICE)

    assert torch.equal(triton.rms_norm(zeros, weight, 1e-6), zeros)


@pytest.mark.skipif(not INTERPRETED, reason="maps memory that it never touches")
@pytest.mark.parametrize("name", NAMES)
def test_rows_may_lie_further_apart_than_an_int32_counts(name: str) -> None:
    rows = far_apart(torch.randn(3, 2, 32, dtype=torch.float16))

    assert_equals_naive(name, rows.unsqueeze(0))
    assert_equals_naive(name, rows.transpose(0, 1).unsqueeze(0))
