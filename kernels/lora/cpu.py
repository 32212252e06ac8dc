"""LoRA for a flat batch of mixed adapters in native code, for float32 and bfloat16."""

import ctypes
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from loraplex.kernels.lora.operands import LoRAOperand
from loraplex.kernels.native.library import native, num_threads
from loraplex.kernels.native.panels import pack_panels

_GRAIN = 64 * 1024  # bytes of weights, read by a few rows, worth a thread
_FEW_ROWS = 4


@dataclass(frozen=True)
class PackedOperand:
    """One adapter on one linear, in the order in which the kernel reads it."""

    a: Tensor  # [sum of the slices' ranks, in], contiguous
    b: tuple[Tensor, ...]  # of each slice: panels of its output columns
    description: ctypes.Array[ctypes.c_char]  # what the kernel is given: addresses and sizes
    num_bytes: int

    @classmethod
    def pack(cls, operand: LoRAOperand) -> Self:
        """Packs weights of one dtype, float32 or bfloat16, on the CPU."""
        a = operand.a.contiguous()
        packed = tuple(pack_panels(part.b) for part in operand.slices)
        description = struct.pack("<qqq", a.data_ptr(), a.shape[1], len(packed))
        for part, b in zip(operand.slices, packed, strict=True):
            width, rank = part.b.shape
            description += struct.pack(
                "<qqqqd", part.start, width, rank, b.data_ptr(), part.scaling
            )
        num_bytes = a.nbytes + sum(b.nbytes for b in packed)
        return cls(a, packed, ctypes.create_string_buffer(description), num_bytes)


Segment = tuple[Tensor, PackedOperand]  # [n] int64 rows, contiguous, and the adapter they use


def add_lora(out: Tensor, x: Tensor, segments: Sequence[Segment]) -> None:
    """As `naive.add_lora`, with packed weights, all of one dtype."""
    if segments and out.dtype != (dtype := segments[0][1].a.dtype):
        delta = torch.zeros(out.shape, dtype=dtype)
        add_lora(delta, x, segments)
        out += delta
        return
    x = x.to(out.dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    table, work = array("q"), 0
    for rows, operand in segments:
        num_rows = rows.shape[0]
        table.extend((rows.data_ptr(), num_rows, ctypes.addressof(operand.description)))
        work += operand.num_bytes * -(-num_rows // _FEW_ROWS)
    kernel = (
        native().lpx_add_lora_float if out.dtype == torch.float32 else native().lpx_add_lora_bf16
    )
    kernel(
        out.data_ptr(),
        out.stride(0),
        x.data_ptr(),
        x.stride(0),
        table.buffer_info()[0],
        len(segments),
        num_threads(work, _GRAIN),
    )
