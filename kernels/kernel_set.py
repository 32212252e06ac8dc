"""Kernels: one implementation of each operation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from loraplex.kernels.draw.settings import DrawSettings
from loraplex.kernels.linear.format import LinearFormat
from loraplex.kernels.lora.batch import LoRABatch
from loraplex.kernels.lora.operands import LoRATable


class KernelsUnavailable(Exception):
    """Raised where kernels that were asked for by name do not run here; the message says why."""


@dataclass(frozen=True)
class Kernels:
    """One implementation of each operation; the contracts are in the naive modules."""

    name: str
    paged_attention: Callable[..., Tensor]
    write_cache: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    copy_blocks: Callable[[Tensor, Tensor, Tensor], None]
    gather_blocks: Callable[[Tensor, Tensor, Tensor], None]
    scatter_blocks: Callable[[Tensor, Tensor, Tensor], None]
    lora_table: Callable[[int], LoRATable]  # of so many slots, as `add_lora` takes it
    add_lora: Callable[[Tensor, Tensor, Any, LoRABatch], None]
    embedding_lora_table: Callable[[int], LoRATable]
    add_embedding_lora: Callable[[Tensor, Tensor, Any, LoRABatch, float], None]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rms_norm_rounding_first: Callable[[Tensor, Tensor, float], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    gated_silu: Callable[[Tensor], Tensor]
    gated_gelu_tanh: Callable[[Tensor], Tensor]
    argmax: Callable[[Tensor], Tensor]
    draw: Callable[[Tensor, Tensor, DrawSettings, Tensor], Tensor]
    empty: Callable[..., Tensor]  # (shape..., dtype=, device=), for what is read in long streams
    linears: LinearFormat | None  # None: torch's own linears
    int8_linears: LinearFormat | None
