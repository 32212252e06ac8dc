"""Runs a model's gated feed-forward layers on our kernel, where they compute a form it knows."""

import torch
from torch import Tensor, nn

from loraplex.adapters.layers import FusedLinear
from loraplex.engine.model.modules import places, reproduces
from loraplex.kernels.dispatch import NAIVE
from loraplex.kernels.kernel_set import Kernels

_ACTIVATIONS = ("gated_silu", "gated_gelu_tanh")
_SAMPLE = 3  # rows by which an activation is compared with the module's


class GatedFeedForward(nn.Module):
    """Takes the place of a model's own feed-forward layer, over the same linears."""

    def __init__(
        self, gate_up: FusedLinear, down: nn.Module, activation: str, kernels: Kernels
    ) -> None:
        super().__init__()
        self.gate_up_proj = gate_up
        self.down_proj = down
        self._activation = activation
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]"""
        gated = getattr(self._kernels, self._activation)(self.gate_up_proj(x))
        out: Tensor = self.down_proj(gated)
        return out


def replace_feed_forward(model: nn.Module, kernels: Kernels) -> None:
    """Replaces every feed-forward layer whose results ours reproduces; others stay as they are.

    Gate and up must be fused already; the running batch must be all base.
    """
    for place, module in places(model):
        gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
        if not isinstance(gate_up, FusedLinear) or down is None:
            continue
        for activation in _ACTIVATIONS:
            plain = GatedFeedForward(gate_up, down, activation, NAIVE)
            if _agree(plain, module, gate_up.weight):
                place.put(GatedFeedForward(gate_up, down, activation, kernels))
                break


def _agree(ours: nn.Module, theirs: nn.Module, weight: Tensor) -> bool:
    """Returns whether both agree to the bit on random rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_SAMPLE, weight.shape[1], generator=generator).to(weight)
    return reproduces(ours, theirs, x)
