"""Chooses the implementation of each operation, once, when a model is loaded."""

import logging
import math
from functools import partial

import torch
from torch import Tensor

from loraplex.kernels.attention import cpu as attention_cpu
from loraplex.kernels.attention import naive as attention_naive
from loraplex.kernels.draw import cpu as draw_cpu
from loraplex.kernels.draw import naive as draw_naive
from loraplex.kernels.gated_activation import cpu as gated_activation_cpu
from loraplex.kernels.gated_activation import naive as gated_activation_naive
from loraplex.kernels.int8_linear import cpu as int8_linear_cpu
from loraplex.kernels.int8_linear import naive as int8_linear_naive
from loraplex.kernels.kernel_set import Kernels, KernelsUnavailable
from loraplex.kernels.kv_cache import cpu as kv_cache_cpu
from loraplex.kernels.kv_cache import naive as kv_cache_naive
from loraplex.kernels.linear import cpu as linear_cpu
from loraplex.kernels.linear import naive as linear_naive
from loraplex.kernels.lora import cpu as lora_cpu
from loraplex.kernels.lora import naive as lora_naive
from loraplex.kernels.native.build import NativeUnavailable
from loraplex.kernels.native.huge_pages import HugePageChunks, HugePages
from loraplex.kernels.native.library import native
from loraplex.kernels.rms_norm import cpu as rms_norm_cpu
from loraplex.kernels.rms_norm import naive as rms_norm_naive
from loraplex.kernels.rotary import cpu as rotary_cpu
from loraplex.kernels.rotary import naive as rotary_naive
from loraplex.kernels.sampling import cpu as sampling_cpu
from loraplex.kernels.sampling import naive as sampling_naive

logger = logging.getLogger(__name__)


def _empty_in_huge_pages(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return HugePages(math.prod(shape) * dtype.itemsize).empty(*shape, dtype=dtype)


NAIVE = Kernels(
    name="naive",
    paged_attention=attention_naive.paged_attention,
    write_cache=kv_cache_naive.write_cache,
    copy_blocks=kv_cache_naive.copy_blocks,
    gather_blocks=kv_cache_naive.gather_blocks,
    scatter_blocks=kv_cache_naive.scatter_blocks,
    lora_table=lora_naive.LoRATable,
    add_lora=lora_naive.add_lora,
    embedding_lora_table=lora_naive.LoRATable,
    add_embedding_lora=lora_naive.add_embedding_lora,
    rms_norm=rms_norm_naive.rms_norm,
    rms_norm_rounding_first=rms_norm_naive.rms_norm_rounding_first,
    rotate=rotary_naive.rotate,
    gated_silu=gated_activation_naive.gated_silu,
    gated_gelu_tanh=gated_activation_naive.gated_gelu_tanh,
    argmax=sampling_naive.argmax,
    draw=draw_naive.draw,
    empty=torch.empty,
    linears=linear_naive.FORMAT,
    int8_linears=int8_linear_naive.FORMAT,
)


def choose_kernels(asked: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    """Returns the fastest implementations for a model's device and dtype.

    Args:
        asked: `auto`; `naive` for plain torch whatever the machine can do; `triton`, which on a CPU
            takes Triton's interpreter.

    Raises:
        KernelsUnavailable: `triton` was asked for, and does not run on this GPU.
    """
    if asked == "naive" or device.type not in ("cpu", "cuda"):
        return NAIVE
    if asked == "triton" or device.type == "cuda":
        return _triton(asked, device, dtype)
    return _native(dtype)


def is_triton_error(error: Exception) -> bool:
    """Returns whether Triton could not compile or launch a kernel; without loading Triton."""
    return any(kind.__name__ == "TritonError" for kind in type(error).__mro__)


def _triton(asked: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    try:
        from loraplex.kernels import triton_set  # noqa: PLC0415
    except ImportError as reason:
        logger.warning("no Triton, running on plain torch, which is slower: %s", reason)
        return NAIVE
    if not triton_set.runs_on(device) or dtype not in triton_set.DTYPES:
        logger.warning("no Triton for %s on %s, running on plain torch", dtype, device)
        return NAIVE
    fault = triton_set.fault_of(device)
    if fault is not None and asked == "triton":
        raise KernelsUnavailable(f"Triton's kernels do not run on this GPU: {fault}")
    if fault is not None:
        logger.warning("no Triton on this GPU, running on plain torch, which is slower: %s", fault)
        return NAIVE
    return triton_set.triton_kernels(device, dtype)


def _native(dtype: torch.dtype) -> Kernels:
    if dtype not in (torch.float32, torch.bfloat16):
        logger.info("no native kernels for %s; running on plain torch", dtype)
        return NAIVE
    try:
        native()
    except NativeUnavailable as reason:
        logger.warning("no native kernels, running on plain torch, which is slower: %s", reason)
        return NAIVE
    adapter_memory = HugePageChunks(lora_cpu.CHUNK)
    return Kernels(
        name="cpu",
        paged_attention=attention_cpu.paged_attention,
        write_cache=kv_cache_cpu.write_cache,
        copy_blocks=kv_cache_cpu.copy_blocks,
        gather_blocks=kv_cache_cpu.gather_blocks,
        scatter_blocks=kv_cache_cpu.scatter_blocks,
        lora_table=partial(lora_cpu.LoRATable, dtype=dtype, memory=adapter_memory),
        add_lora=lora_cpu.add_lora,
        embedding_lora_table=partial(
            lora_cpu.EmbeddingLoRATable, dtype=dtype, memory=adapter_memory
        ),
        add_embedding_lora=lora_cpu.add_embedding_lora,
        rms_norm=rms_norm_cpu.rms_norm,
        rms_norm_rounding_first=rms_norm_cpu.rms_norm_rounding_first,
        rotate=rotary_cpu.rotate,
        gated_silu=gated_activation_cpu.gated_silu,
        gated_gelu_tanh=gated_activation_cpu.gated_gelu_tanh,
        argmax=sampling_cpu.argmax,
        draw=draw_cpu.draw,
        empty=_empty_in_huge_pages,
        linears=linear_cpu.FORMAT,
        int8_linears=int8_linear_cpu.FORMAT,
    )
