"""LoRA for a flat batch of mixed adapters in native code, for float32 and bfloat16."""

import ctypes
import math
import struct
from array import array
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from loraplex.kernels.lora.batch import LoRABatch
from loraplex.kernels.lora.operands import LoRAOperand
from loraplex.kernels.native.huge_pages import HugePageChunks
from loraplex.kernels.native.library import launch
from loraplex.kernels.native.panels import panels_shape

_LINE = 64  # bytes
_RANK_BLOCK = 4  # rows of A that are multiplied at a time

CHUNK = 8 << 20  # bytes of memory that weights are cut from


@dataclass(frozen=True)
class PackedOperand:
    """One adapter on one linear or embedding, in the order in which the kernel reads it."""

    weights: Tensor  # A, then each slice's B in panels, in one piece
    scales: "array[float]"  # [ranks, padded], the scaling of each rank
    description: ctypes.Array[ctypes.c_char]  # what the kernel is given: addresses and sizes


class LoRATable:
    """The adapters of one linear by slot, packed, all of one dtype.

    Args:
        memory: where the weights are put; the tables of one model share it.
    """

    def __init__(
        self, num_slots: int, dtype: torch.dtype, memory: HugePageChunks | None = None
    ) -> None:
        self._memory = memory or HugePageChunks(CHUNK)
        self._packed: list[PackedOperand | None] = [None] * num_slots
        self.addresses = torch.zeros(num_slots, dtype=torch.int64)  # of descriptions; 0: empty
        self.dtype = dtype  # of the weights; a launch may be recorded before there are some

    def set(self, slot: int, operand: LoRAOperand | None) -> None:
        packed = None if operand is None else self._pack(operand)
        self.addresses[slot] = 0 if packed is None else ctypes.addressof(packed.description)
        self._packed[slot] = packed

    def _pack(self, operand: LoRAOperand) -> PackedOperand:
        ranks, depth = operand.a.shape
        size = _padded(ranks, _RANK_BLOCK) * _padded(depth, _LINE // self.dtype.itemsize)
        packed = _with_expand_operands(operand, size, depth, self._memory)
        _pack("shrink", operand.a, packed.weights)
        return packed


class EmbeddingLoRATable(LoRATable):
    """The adapters of one embedding by slot, packed, all of one dtype."""

    def _pack(self, operand: LoRAOperand) -> PackedOperand:
        packed = _with_expand_operands(operand, operand.a.numel(), 1, self._memory)
        by_token = operand.a.t()
        packed.weights[: by_token.numel()].view(by_token.shape).copy_(by_token)
        return packed


def _with_expand_operands(
    operand: LoRAOperand, size_of_a: int, depth: int, memory: HugePageChunks
) -> PackedOperand:
    """Packs the slices behind room for A; all of one dtype, float32 or bfloat16.

    Args:
        size_of_a: in numbers, when it is packed.
        depth: how many numbers of A a row meets for each rank.
        memory: where they are put.
    """
    dtype = operand.a.dtype
    shapes = [panels_shape(part.b.shape[0], part.b.shape[1], dtype) for part in operand.slices]
    sizes = [size_of_a, *map(math.prod, shapes)]
    line = _LINE // dtype.itemsize
    starts = list(accumulate((_padded(size, line) for size in sizes), initial=0))
    weights = memory.empty(starts[-1], dtype=dtype)
    scales = array("f")
    for start, (_, b, scaling) in zip(starts[1:], operand.slices, strict=False):
        _pack("expand", b, weights[start:])
        scales.extend([scaling] * b.shape[1])
    ranks = len(scales)
    scales.extend([0.0] * (_padded(ranks, _RANK_BLOCK) - ranks))
    description = struct.pack(
        "<5q", weights.data_ptr(), scales.buffer_info()[0], depth, ranks, len(operand.slices)
    )
    for start, (column, b, _) in zip(starts[1:], operand.slices, strict=False):
        address = weights.data_ptr() + start * dtype.itemsize
        description += struct.pack("<4q", column, *b.shape, address)
    return PackedOperand(weights, scales, ctypes.create_string_buffer(description))


def _pack(product: str, matrix: Tensor, out: Tensor) -> None:
    """Packs A for the `shrink` product, or a slice's B for the `expand` product, into `out`."""
    suffix = "float" if out.dtype == torch.float32 else "bf16"
    source = matrix.contiguous()
    launch(f"lpx_pack_lora_{product}_{suffix}", source, *source.shape, out, torch.get_num_threads())


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def add_lora(out: Tensor, x: Tensor, table: LoRATable, batch: LoRABatch) -> None:
    """As `naive.add_lora`."""
    if out.dtype != table.dtype:
        delta = torch.zeros(out.shape, dtype=table.dtype)
        add_lora(delta, x, table, batch)
        out += delta
        return
    x = x.to(out.dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    launch(
        "lpx_add_lora_float" if out.dtype == torch.float32 else "lpx_add_lora_bf16",
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


def add_embedding_lora(
    out: Tensor,
    token_ids: Tensor,
    table: EmbeddingLoRATable,
    batch: LoRABatch,
    embed_scale: float,
) -> None:
    """As `naive.add_embedding_lora`."""
    if out.dtype != table.dtype:
        delta = torch.zeros(out.shape, dtype=table.dtype)
        add_embedding_lora(delta, token_ids, table, batch, embed_scale)
        out += delta
        return
    is_wide = out.dtype == torch.float32
    launch(
        "lpx_add_embedding_lora_float" if is_wide else "lpx_add_embedding_lora_bf16",
        out,
        out.stride(0),
        token_ids.to(torch.int64).contiguous(),
        embed_scale,
        table.addresses,
        batch.rows,
        batch.slots,
        batch.starts,
        batch.slots.shape[0],
        torch.get_num_threads(),
    )
