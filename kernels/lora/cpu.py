"""LoRA for a flat batch of mixed adapters in native code, for float32 and bfloat16."""

import ctypes
import struct
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from loraplex.kernels.lora.batch import LoRABatch
from loraplex.kernels.lora.operands import LoRAOperand
from loraplex.kernels.native.huge_pages import HugePageChunks
from loraplex.kernels.native.library import launch
from loraplex.kernels.native.panels import pack_panels

_LINE = 64  # bytes
_RANK_BLOCK = 4  # rows of A that are multiplied at a time

_memory = HugePageChunks(8 << 20)


@dataclass(frozen=True)
class PackedOperand:
    """One adapter on one linear or embedding, in the order in which the kernel reads it."""

    weights: Tensor  # A, then each slice's B in panels, in one piece
    scales: Tensor  # [ranks, padded] float32, the scaling of each rank
    description: ctypes.Array[ctypes.c_char]  # what the kernel is given: addresses and sizes


def _pack(operand: LoRAOperand, a: Tensor, depth: int) -> PackedOperand:
    """Joins A, packed already, with the slices; all of one dtype, float32 or bfloat16."""
    parts = [a, *(pack_panels(part.b) for part in operand.slices)]
    starts = [0]
    for part in parts:
        starts.append(-(-(starts[-1] + part.nbytes) // _LINE) * _LINE)
    weights = _memory.empty(starts[-1] // a.itemsize, dtype=a.dtype)
    for start, part in zip(starts, parts, strict=False):
        weights[start // a.itemsize :][: part.numel()] = part.flatten()
    ranks = [part.b.shape[1] for part in operand.slices]
    scales = torch.zeros(-(-sum(ranks) // _RANK_BLOCK) * _RANK_BLOCK)
    scalings = torch.tensor([part.scaling for part in operand.slices])
    scales[: sum(ranks)] = scalings.repeat_interleave(torch.tensor(ranks))
    description = struct.pack(
        "<5q", weights.data_ptr(), scales.data_ptr(), depth, sum(ranks), len(ranks)
    )
    for start, (column, b, _) in zip(starts[1:], operand.slices, strict=False):
        description += struct.pack("<4q", column, *b.shape, weights.data_ptr() + start)
    return PackedOperand(weights, scales, ctypes.create_string_buffer(description))


class LoRATable:
    """The adapters of one linear by slot, packed, all of one dtype."""

    def __init__(self, num_slots: int, dtype: torch.dtype) -> None:
        self._packed: list[PackedOperand | None] = [None] * num_slots
        self.addresses = torch.zeros(num_slots, dtype=torch.int64)  # of descriptions; 0: empty
        self.dtype = dtype  # of the weights; a launch may be recorded before there are some

    def set(self, slot: int, operand: LoRAOperand | None) -> None:
        packed = None if operand is None else self._pack(operand)
        self.addresses[slot] = 0 if packed is None else ctypes.addressof(packed.description)
        self._packed[slot] = packed

    def _pack(self, operand: LoRAOperand) -> PackedOperand:
        ranks, depth = operand.a.shape
        line = _LINE // operand.a.itemsize
        padded = functional.pad(operand.a, (0, -depth % line, 0, -ranks % _RANK_BLOCK))
        blocks = padded.view(padded.shape[0] // _RANK_BLOCK, _RANK_BLOCK, -1, line)
        return _pack(operand, blocks.transpose(1, 2), depth)


class EmbeddingLoRATable(LoRATable):
    """The adapters of one embedding by slot, packed, all of one dtype."""

    def _pack(self, operand: LoRAOperand) -> PackedOperand:
        return _pack(operand, operand.a.t(), 1)


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
