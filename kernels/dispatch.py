"""Which implementation of each operation a model runs on, chosen once when it is loaded."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loraplex.kernels.attention import cpu as attention_cpu
from loraplex.kernels.attention import naive as attention_naive
from loraplex.kernels.kv_cache import cpu as kv_cache_cpu
from loraplex.kernels.kv_cache import naive as kv_cache_naive
from loraplex.kernels.lora import cpu as lora_cpu
from loraplex.kernels.lora import naive as lora_naive
from loraplex.kernels.lora.operands import LoRAOperand
from loraplex.kernels.native.build import NativeUnavailable
from loraplex.kernels.native.library import native

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """One implementation of each operation; their contracts stand in the naive modules."""

    name: str
    paged_attention: Callable[..., Tensor]
    write_cache: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    copy_blocks: Callable[[Tensor, Tensor, Tensor], None]
    pack_lora: Callable[[LoRAOperand], Any]  # once, into what `add_lora` takes
    add_lora: Callable[..., None]
    packs_linears: bool  # whether weights of linears go into `kernels.linear.cpu.PackedWeight`


NAIVE = Kernels(
    name="naive",
    paged_attention=attention_naive.paged_attention,
    write_cache=kv_cache_naive.write_cache,
    copy_blocks=kv_cache_naive.copy_blocks,
    pack_lora=lambda operand: operand,
    add_lora=lora_naive.add_lora,
    packs_linears=False,
)


def choose_kernels(asked: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The fastest implementations for a model's device and dtype.

    Args:
        asked: `auto`, or `naive` for plain torch whatever the machine can do.
    """
    if asked == "naive" or device.type != "cpu":
        return NAIVE
    if dtype not in (torch.float32, torch.bfloat16):
        logger.info("no native kernels for %s; running on plain torch", dtype)
        return NAIVE
    try:
        native()
    except NativeUnavailable as reason:
        logger.warning("no native kernels, running on plain torch, which is slower: %s", reason)
        return NAIVE
    return Kernels(
        name="cpu",
        paged_attention=attention_cpu.paged_attention,
        write_cache=kv_cache_cpu.write_cache,
        copy_blocks=kv_cache_cpu.copy_blocks,
        pack_lora=lora_cpu.PackedOperand.pack,
        add_lora=lora_cpu.add_lora,
        packs_linears=dtype == torch.bfloat16,
    )
