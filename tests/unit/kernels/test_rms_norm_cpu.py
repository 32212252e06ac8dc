"""Native root mean square normalisation against the naive one."""

import pytest
import torch

from loraplex.kernels.rms_norm import cpu, naive

pytestmark = pytest.mark.usefixtures("native")

NAMES = ["rms_norm", "rms_norm_rounding_first"]
DTYPES = [torch.float32, torch.bfloat16]


def assert_equals_naive(name: str, x: torch.Tensor) -> None:
    weight = torch.randn(x.shape[-1])
    want = getattr(naive, name)(x, weight.to(x.dtype).float(), 1e-6)

    got = getattr(cpu, name)(x, weight.to(x.dtype).float(), 1e-6)

    assert got.dtype == x.dtype
    # Sums in another order may fall on the other side of a rounding border, once or twice.
    rtol = 1e-5 if x.dtype == torch.float32 else 2**-6
    torch.testing.assert_close(got, want, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 64, 100, 640])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_every_size(name: str, dtype: torch.dtype, columns: int, rows: int) -> None:
    assert_equals_naive(name, torch.randn(rows, columns).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("view", ["heads", "batches", "columns apart", "vector"])
def test_views_with_strides(name: str, dtype: torch.dtype, view: str) -> None:
    whole = torch.randn(2, 5, 4, 64).to(dtype)
    views = {
        "heads": whole[:1, :, :3].transpose(1, 2),  # as a projection's heads
        "batches": whole.transpose(1, 2),
        "columns apart": whole[0, ..., ::2],
        "vector": whole[0, 0, 0],
    }
    assert_equals_naive(name, views[view])


def test_a_row_of_zeros_stays_zero() -> None:
    assert torch.equal(cpu.rms_norm(torch.zeros(2, 20), torch.ones(20), 1e-6), torch.zeros(2, 20))
