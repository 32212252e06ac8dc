"""LoRA for a flat batch of mixed adapters in native code, for float32 and bfloat16."""

import ctypes
import struct
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from loraplex.kernels.lora.batch import LoRABatch
from loraplex.kernels.lora.operands import LoRAOperand
from loraplex.kernels.native.library import launch
from loraplex.kernels.native.panels import pack_panels


@dataclass(frozen=True)
class PackedOperand:
    """One adapter on one linear, in the order in which the kernel reads it."""

    a: Tensor  # [sum of the slices' ranks, in], contiguous
    b: tuple[Tensor, ...]  # of each slice: panels of its output columns
    description: ctypes.Array[ctypes.c_char]  # what the kernel is given: addresses and sizes

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
        return cls(a, packed, ctypes.create_string_buffer(description))


class LoRATable:
    """The adapters of one linear by slot, packed, all of one dtype."""

    def __init__(self, num_slots: int) -> None:
        self._packed: list[PackedOperand | None] = [None] * num_slots
        self.addresses = torch.zeros(num_slots, dtype=torch.int64)  # of descriptions; 0: empty
        self.dtype: torch.dtype | None = None  # of the weights; None until there are some

    def set(self, slot: int, operand: LoRAOperand | None) -> None:
        packed = None if operand is None else PackedOperand.pack(operand)
        self.addresses[slot] = 0 if packed is None else ctypes.addressof(packed.description)
        self._packed[slot] = packed
        self.dtype = self.dtype if packed is None else packed.a.dtype


def add_lora(out: Tensor, x: Tensor, table: LoRATable, batch: LoRABatch) -> None:
    """As `naive.add_lora`."""
    if table.dtype is not None and out.dtype != table.dtype:
        delta = torch.zeros(out.shape, dtype=table.dtype)
        add_lora(delta, x, table, batch)
        out += delta
        return
    x = x.to(out.dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    kernel = "lpx_add_lora_float" if out.dtype == torch.float32 else "lpx_add_lora_bf16"
    launch(
        kernel,
        out,
        out.stride(0),
        x,
        x.stride(0),
        table.addresses,
        batch.rows,
        batch.slots,
        batch.starts,
        batch.slots.shape[0],
        torch.get_num_threads(),
    )
