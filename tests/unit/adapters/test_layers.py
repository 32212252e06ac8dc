"""The layers that stand in for a model's own."""

import pytest
import torch
from torch import nn

from loraplex.adapters.layers import (
    FusedLinear,
    FusedMember,
    LoRAContext,
    LoRAEmbedding,
    LoRALinear,
)
from loraplex.kernels.lora.batch import LoRABatch
from loraplex.kernels.lora.operands import LoRAOperand, LoRASlice

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def context() -> LoRAContext:
    return LoRAContext()


def operand(in_features: int, width: int, start: int = 0) -> LoRAOperand:
    return LoRAOperand(torch.randn(2, in_features), (LoRASlice(start, torch.randn(width, 2), 0.5),))


def fuse(linears: list[nn.Linear], context: LoRAContext) -> tuple[FusedLinear, list[FusedMember]]:
    fused = FusedLinear(linears, lambda: context.hidden, num_slots=2)
    return fused, [FusedMember(fused, index) for index in range(len(linears))]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 7, 16), (7, 16), (2, 3, 16)])
@torch.inference_mode()
def test_fused_members_give_what_the_linears_gave(
    bias: bool, shape: tuple[int, ...], context: LoRAContext
) -> None:
    linears = [nn.Linear(16, width, bias=bias) for width in (12, 4, 4)]
    x = torch.randn(shape)
    _, members = fuse(linears, context)
    for member, linear in zip(members, linears, strict=True):
        torch.testing.assert_close(member(x), linear(x))


@torch.inference_mode()
def test_members_in_any_order_and_twice_see_their_own_input(context: LoRAContext) -> None:
    linears = [nn.Linear(8, 4) for _ in range(3)]
    _, members = fuse(linears, context)
    x, y = torch.randn(2, 8), torch.randn(2, 8)
    for index, given in ((2, x), (0, x), (0, x), (1, y), (2, y), (2, x)):
        torch.testing.assert_close(members[index](given), linears[index](given))


@torch.inference_mode()
def test_an_input_that_is_written_over_is_computed_again(context: LoRAContext) -> None:
    linears = [nn.Linear(8, 4) for _ in range(2)]
    _, members = fuse(linears, context)
    x = torch.randn(2, 8)
    for _ in range(2):  # only one member is ever called, with the same buffer
        x.normal_()
        torch.testing.assert_close(members[0](x), linears[0](x))


@torch.inference_mode()
def test_nothing_is_held_after_the_last_member(context: LoRAContext) -> None:
    fused, members = fuse([nn.Linear(8, 4), nn.Linear(8, 4)], context)
    x = torch.randn(2, 8)
    for member in members:
        member(x)
    held = [value for value in vars(fused).values() if isinstance(value, torch.Tensor)]
    assert held == []


@torch.inference_mode()
def test_a_fused_delta_reaches_its_member_only(context: LoRAContext) -> None:
    fused, members = fuse([nn.Linear(8, 4), nn.Linear(8, 6)], context)
    x = torch.randn(3, 8)
    before = [member(x) for member in members]
    weights = operand(8, 6, start=4)
    fused.set(1, weights)
    context.hidden = LoRABatch.build([-1, 1, 1], CPU)
    after = [member(x) for member in members]
    delta = 0.5 * (x @ weights.a.t() @ weights.slices[0].b.t())
    delta[0] = 0
    assert torch.equal(after[0], before[0])
    torch.testing.assert_close(after[1], before[1] + delta)


@torch.inference_mode()
def test_an_empty_slot_is_the_base(context: LoRAContext) -> None:
    base = nn.Linear(8, 4)
    layer = LoRALinear(base, lambda: context.hidden, num_slots=2)
    layer.set(0, operand(8, 4))
    layer.set(0, None)
    context.hidden = LoRABatch.build([0, 1], CPU)
    x = torch.randn(2, 8)
    assert torch.equal(layer(x), base(x))


@torch.inference_mode()
def test_rows_of_another_batch_are_an_error(context: LoRAContext) -> None:
    layer = LoRALinear(nn.Linear(8, 4), lambda: context.hidden, num_slots=1)
    context.hidden = LoRABatch.build([0, 0, 0], CPU)
    with pytest.raises(RuntimeError, match="2 rows in a batch of 3"):
        layer(torch.randn(2, 8))


@torch.inference_mode()
def test_the_delta_of_an_embedding_is_scaled_as_its_rows_are(context: LoRAContext) -> None:
    base = nn.Embedding(10, 4)
    base.embed_scale = torch.tensor(3.0)
    layer = LoRAEmbedding(base, lambda: context.hidden, num_slots=1)
    weights = operand(10, 4)
    layer.set(0, weights)
    context.hidden = LoRABatch.build([-1, 0], CPU)
    ids = torch.tensor([[5, 6]])
    delta = 3.0 * 0.5 * (weights.slices[0].b @ weights.a[:, 6])
    torch.testing.assert_close(layer(ids)[0, 1], base(ids)[0, 1] + delta)
