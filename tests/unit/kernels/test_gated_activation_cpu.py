"""Native gated activations against the naive ones in float32."""

import pytest
import torch

from loraplex.kernels.gated_activation import cpu, naive

pytestmark = pytest.mark.usefixtures("native")

NAMES = ["gated_silu", "gated_gelu_tanh"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 96, 100])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 5)])
def test_every_size(name: str, dtype: torch.dtype, width: int, shape: tuple[int, ...]) -> None:
    x = (4 * torch.randn(*shape, 2 * width)).to(dtype)

    got = getattr(cpu, name)(x)

    assert got.dtype == dtype
    rtol = 1e-5 if dtype == torch.float32 else 2**-8
    want = getattr(naive, name)(x.float())
    torch.testing.assert_close(got.float(), want, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_ends_of_the_range(name: str) -> None:
    gate = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4])
    x = torch.cat([gate, torch.ones(7)])

    torch.testing.assert_close(getattr(cpu, name)(x), getattr(naive, name)(x), rtol=1e-5, atol=1e-6)
