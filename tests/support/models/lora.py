"""LoRA weights and batches for tests of kernels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from loraplex.kernels.lora import naive
from loraplex.kernels.lora.batch import BASE_SLOT, LoRABatch
from loraplex.kernels.lora.operands import LoRAOperand, LoRASlice

Segment = tuple[Tensor, LoRAOperand]  # [n] int64 rows, and the adapter they use


def random_operand(
    in_features: int,
    slices: Sequence[tuple[int, int, int]],
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
) -> LoRAOperand:
    """Slices are (first column, width, rank); with A scaled so that deltas are of order one."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    a = random(sum(rank for _, _, rank in slices), in_features) / in_features**0.5
    parts = tuple(
        LoRASlice(start, random(width, rank).to(dtype), 0.5) for start, width, rank in slices
    )
    return LoRAOperand(a.to(dtype), parts)


def cast(weights: LoRAOperand, dtype: torch.dtype) -> LoRAOperand:
    slices = tuple(part._replace(b=part.b.to(dtype)) for part in weights.slices)
    return LoRAOperand(weights.a.to(dtype), slices)


def fill_table(table: Any, operands: Sequence[LoRAOperand | None]) -> Any:
    """One adapter in each slot."""
    for slot, weights in enumerate(operands):
        table.set(slot, weights)
    return table


def table_of(kind: Any, operands: Sequence[LoRAOperand]) -> Any:
    """A naive or native table with one adapter in each slot."""
    dtype = () if kind is naive.LoRATable else (operands[0].a.dtype,)
    return fill_table(kind(len(operands), *dtype), operands)


def batch_of(segments: Sequence[Segment], num_rows: int) -> LoRABatch | None:
    """The batch in which segment i uses slot i."""
    slots = torch.full((num_rows,), BASE_SLOT, dtype=torch.int32)
    for slot, (rows, _) in enumerate(segments):
        slots[rows] = slot
    return LoRABatch.build(slots.numpy())


def run_segments(kernel: Any, out: Tensor, x: Tensor, segments: Sequence[Segment]) -> None:
    """Runs `add_lora` of a kernel module, unless no row has an adapter."""
    batch = batch_of(segments, len(out))
    if batch is not None:
        table = table_of(kernel.LoRATable, [weights for _, weights in segments])
        kernel.add_lora(out, x, table, batch)
