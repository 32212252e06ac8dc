"""Which feed-forward layers are replaced, and that LoRA acts in them as before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from loraplex.adapters.layers import FusedLinear, FusedMember, LoRAContext, LoRALinear
from loraplex.engine.model.feed_forward import GatedFeedForward, replace_feed_forward
from loraplex.kernels.dispatch import choose_kernels
from loraplex.kernels.lora.batch import LoRABatch
from loraplex.kernels.lora.operands import LoRAOperand, LoRASlice

CPU = torch.device("cpu")
KERNELS = choose_kernels("auto", CPU, torch.float32)


class FeedForward(nn.Module):
    """As transformers writes it, with our linears in it."""

    def __init__(self, activation: Callable[[Tensor], Tensor], context: LoRAContext) -> None:
        super().__init__()

        def batch() -> LoRABatch | None:
            return context.hidden

        linears = [nn.Linear(24, 40), nn.Linear(24, 40)]
        self.gate_up_proj = FusedLinear(linears, batch, 1, KERNELS)
        self.gate_proj = FusedMember(self.gate_up_proj, 0)
        self.up_proj = FusedMember(self.gate_up_proj, 1)
        self.down_proj = LoRALinear(nn.Linear(40, 24), batch, 1, KERNELS)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return out


def gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


@pytest.fixture
def context() -> LoRAContext:
    torch.manual_seed(0)
    return LoRAContext()


@pytest.mark.parametrize("activation", [functional.silu, gelu_tanh])
@torch.inference_mode()
def test_a_known_activation_is_replaced_and_gives_the_same(
    activation: Callable[[Tensor], Tensor], context: LoRAContext
) -> None:
    model = nn.Sequential(FeedForward(activation, context))
    x = torch.randn(2, 5, 24)
    want = model(x)

    replace_feed_forward(model, KERNELS)

    assert isinstance(model[0], GatedFeedForward)
    torch.testing.assert_close(model(x), want)


@torch.inference_mode()
def test_another_activation_stays(context: LoRAContext) -> None:
    model = nn.Sequential(FeedForward(functional.gelu, context))

    replace_feed_forward(model, KERNELS)

    assert isinstance(model[0], FeedForward)


class WithScores(FeedForward):
    """As experts are: more than rows comes back."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class WithRoute(FeedForward):
    def forward(self, x: Tensor, route: Tensor) -> Any:
        return super().forward(x * route)


@pytest.mark.parametrize("kind", [WithScores, WithRoute])
@torch.inference_mode()
def test_a_layer_of_another_signature_stays(kind: type[FeedForward], context: LoRAContext) -> None:
    model = nn.Sequential(kind(functional.silu, context))

    replace_feed_forward(model, KERNELS)

    assert type(model[0]) is kind


@torch.inference_mode()
def test_adapters_act_in_a_replaced_layer(context: LoRAContext) -> None:
    model = nn.Sequential(FeedForward(functional.silu, context))
    x = torch.randn(3, 24)
    slices = (LoRASlice(0, torch.randn(40, 2), 0.5), LoRASlice(40, torch.randn(40, 2), 0.5))
    model[0].gate_up_proj.set(0, LoRAOperand(torch.randn(4, 24), slices))
    base = model(x)
    context.hidden = LoRABatch.build([0, -1, 0], CPU)
    want = model(x)
    context.hidden = None

    replace_feed_forward(model, KERNELS)

    torch.testing.assert_close(model(x), base)
    context.hidden = LoRABatch.build([0, -1, 0], CPU)
    torch.testing.assert_close(model(x), want)
    assert (want - base).abs().max() > 0.1
