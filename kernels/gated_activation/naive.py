"""The gated activations of feed-forward layers, in plain torch."""

from torch import Tensor
from torch.nn import functional


def gated_silu(gate_up: Tensor) -> Tensor:
    """[..., 2 I], gate then up -> [..., I]: silu(gate) * up, rounded after each."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gated_gelu_tanh(gate_up: Tensor) -> Tensor:
    """As `gated_silu`, with the tanh approximation of GELU."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up
