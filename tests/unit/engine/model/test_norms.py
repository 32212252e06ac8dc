"""Which RMS norms are replaced, and that nothing else is."""

import pytest
import torch
from torch import Tensor, nn

from loraplex.engine.model.norms import RMSNorm, replace_norms
from loraplex.kernels.dispatch import NAIVE, choose_kernels

DTYPES = [torch.float32, torch.bfloat16]


class _Base(nn.Module):
    def __init__(self, size: int = 40) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.variance_epsilon = 1e-5

    def normalised(self, x: Tensor) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class RoundsFirstRMSNorm(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normalised(x).to(x.dtype)


class RoundsLastRMSNorm(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * self.normalised(x)).to(x.dtype)


class OneMoreRMSNorm(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return (self.normalised(x) * (1.0 + self.weight.float())).type_as(x)


class ShiftedRMSNorm(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normalised(x).to(x.dtype) + 1


class WeightlessRMSNorm(nn.Module):
    eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [RoundsFirstRMSNorm, RoundsLastRMSNorm, OneMoreRMSNorm])
@torch.inference_mode()
def test_a_known_form_is_replaced_and_gives_the_same(kind: type[_Base], dtype: torch.dtype) -> None:
    model = nn.Sequential(kind()).to(dtype)
    x = torch.randn(2, 7, 40).to(dtype)
    want = model(x)

    replace_norms(model, choose_kernels("auto", torch.device("cpu"), dtype))

    assert isinstance(model[0], RMSNorm)
    rtol = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(model(x), want, rtol=rtol, atol=1e-6)


class GatedRMSNorm(_Base):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.weight * self.normalised(x) * gate


class PairRMSNorm(_Base):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.weight * self.normalised(x), x


@pytest.mark.parametrize("kind", [ShiftedRMSNorm, WeightlessRMSNorm, GatedRMSNorm, PairRMSNorm])
@torch.inference_mode()
def test_a_norm_that_computes_something_else_stays(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind())

    replace_norms(model, NAIVE)

    assert type(model[0]) is kind


def test_the_weight_stays_the_models_own() -> None:
    norm = OneMoreRMSNorm()
    model = nn.Sequential(norm)

    with torch.inference_mode():
        replace_norms(model, NAIVE)

    assert list(model.parameters()) == [norm.weight]
