"""What packing makes of a model's linears and of embeddings that are tied to one."""

import copy

import pytest
import torch
from torch import nn

from loraplex.engine.model.packing import PackedEmbedding, PackedLinear, pack_linears
from loraplex.kernels.int8_linear import cpu as int8_linear_cpu
from loraplex.kernels.int8_linear import naive as int8_linear_naive
from loraplex.kernels.linear import naive as linear_naive
from loraplex.kernels.linear.cpu import FORMAT
from loraplex.kernels.linear.format import LinearFormat

pytestmark = pytest.mark.usefixtures("native_kernels")


class Scaled(nn.Embedding):
    """Multiplies its rows, as some models' embeddings do."""

    def __init__(self, *shape: int) -> None:
        super().__init__(*shape)
        self.embed_scale = nn.Buffer(torch.tensor(3.3), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.embed_scale.to(self.weight.dtype)


class Shifted(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + 1


class Model(nn.Module):
    def __init__(self, embedding: nn.Embedding, *, tied: bool) -> None:
        super().__init__()
        self.embedding = embedding
        self.inner = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 24, bias=False))
        self.lm_head = nn.Linear(24, 50, bias=False)
        if tied:
            self.lm_head.weight = embedding.weight
        self.to(torch.bfloat16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lm_head(self.inner(self.embedding(ids)))
        return out


IDS = torch.tensor([[0, 49, 7]])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("embedding", [nn.Embedding, Scaled, Shifted])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("format", [FORMAT, linear_naive.FORMAT], ids=["native", "naive"])
@torch.inference_mode()
def test_a_packed_model_computes_the_same(
    embedding: type[nn.Embedding], tied: bool, dtype: torch.dtype, format: LinearFormat
) -> None:
    torch.manual_seed(0)
    model = Model(embedding(50, 24), tied=tied).to(dtype)
    packed = copy.deepcopy(model)

    pack_linears(packed, format)

    assert torch.equal(packed.embedding(IDS), model.embedding(IDS))
    torch.testing.assert_close(packed(IDS), model(IDS), rtol=2e-2, atol=2e-2)


def test_a_tied_weight_is_kept_once() -> None:
    model = Model(Scaled(50, 24), tied=True)
    weight = model.lm_head.weight.detach().clone()

    pack_linears(model, FORMAT)

    assert isinstance(model.lm_head, PackedLinear)
    assert isinstance(model.embedding, PackedEmbedding)
    assert model.lm_head._packed is model.embedding._packed
    assert list(model.lm_head.parameters()) == list(model.embedding.parameters()) == []
    assert torch.equal(model.lm_head.weight, weight)
    assert torch.equal(model.embedding.weight, weight)


def test_an_embedding_that_computes_something_else_keeps_its_weight() -> None:
    model = Model(Shifted(50, 24), tied=True)

    pack_linears(model, FORMAT)

    assert isinstance(model.embedding, Shifted)


def test_a_linear_of_another_format_or_class_stays() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), Special(4, 4, dtype=torch.bfloat16))
    before = list(model)

    pack_linears(model, FORMAT)

    assert list(model) == before


@pytest.mark.parametrize("rounded", [int8_linear_cpu.FORMAT, int8_linear_naive.FORMAT])
@pytest.mark.parametrize("embedding", [nn.Embedding, Scaled])
@torch.inference_mode()
def test_a_model_in_eight_bits_computes_nearly_the_same(
    embedding: type[nn.Embedding], rounded: LinearFormat
) -> None:
    torch.manual_seed(0)
    model = Model(embedding(50, 24), tied=True)
    packed = copy.deepcopy(model)

    pack_linears(packed, rounded)

    assert isinstance(packed.embedding, PackedEmbedding)
    for got, want in (
        (packed.embedding(IDS), model.embedding(IDS)),
        (packed(IDS), model(IDS)),
    ):
        assert float((got - want).norm() / want.norm()) < 0.05
