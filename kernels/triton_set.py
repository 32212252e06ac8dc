"""The Triton kernels as one set. Imported only where it is used: Triton takes a second to load."""

from functools import partial

import torch
import triton

from loraplex.kernels.attention import triton as attention_triton
from loraplex.kernels.draw import naive as draw_naive
from loraplex.kernels.gated_activation import triton as gated_activation_triton
from loraplex.kernels.kernel_set import Kernels
from loraplex.kernels.kv_cache import triton as kv_cache_triton
from loraplex.kernels.lora import triton as lora_triton
from loraplex.kernels.lora.triton_table import EmbeddingLoRATable, LoRATable
from loraplex.kernels.rms_norm import triton as rms_norm_triton
from loraplex.kernels.rotary import triton as rotary_triton
from loraplex.kernels.sampling import triton as sampling_triton

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def runs_on(device: torch.device) -> bool:
    """Returns whether Triton can run: on a GPU, or in its interpreter on a CPU."""
    return device.type == "cuda" or bool(triton.knobs.runtime.interpret)


def fault_of(device: torch.device) -> str | None:
    """Returns why kernels do not run on a GPU, by running one; None: they do, or there is none.

    A compiler for C, which Triton needs to launch, may be missing, or the driver may be too old.
    """
    if device.type != "cuda":
        return None
    x = torch.tensor([[0.0, 3.0, 1.0]], device=device)
    try:
        found = sampling_triton.argmax(x)
        return None if torch.equal(found, x.argmax(dim=-1)) else "a kernel gives a wrong result"
    except Exception as error:  # of the compiler, of the launcher or of the driver
        return str(error).partition("\n")[0] or type(error).__name__


def triton_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    return Kernels(
        name="triton",
        paged_attention=attention_triton.paged_attention,
        write_cache=kv_cache_triton.write_cache,
        copy_blocks=kv_cache_triton.copy_blocks,
        gather_blocks=kv_cache_triton.gather_blocks,
        scatter_blocks=kv_cache_triton.scatter_blocks,
        lora_table=partial(LoRATable, device=device, dtype=dtype),
        add_lora=lora_triton.add_lora,
        embedding_lora_table=partial(EmbeddingLoRATable, device=device, dtype=dtype),
        add_embedding_lora=lora_triton.add_embedding_lora,
        rms_norm=rms_norm_triton.rms_norm,
        rms_norm_rounding_first=rms_norm_triton.rms_norm_rounding_first,
        rotate=rotary_triton.rotate,
        gated_silu=gated_activation_triton.gated_silu,
        gated_gelu_tanh=gated_activation_triton.gated_gelu_tanh,
        argmax=sampling_triton.argmax,
        draw=draw_naive.draw,
        empty=torch.empty,
        linears=None,
        int8_linears=None,
    )
