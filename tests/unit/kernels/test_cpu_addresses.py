"""Tensors of more than 2**31 numbers. Their memory is never touched but where a kernel works."""

import pytest
import torch
from torch import Tensor

from loraplex.kernels.kv_cache.cpu import copy_blocks, gather_blocks, scatter_blocks, write_cache
from loraplex.kernels.lora import cpu, naive
from loraplex.kernels.lora.batch import LoRABatch
from loraplex.kernels.lora.operands import LoRAOperand, LoRASlice

pytestmark = pytest.mark.usefixtures("native")

HEADS, SIZE, DIM = 2, 16, 64
BLOCK = HEADS * SIZE * DIM  # numbers in the keys, or in the values, of one block


def huge(row: int) -> Tensor:
    """[N, row], of which the last rows lie beyond the reach of 32 bits."""
    return torch.empty(2**31 // row + 8, row, dtype=torch.bfloat16)


def test_cache_writes_reach_the_highest_slots() -> None:
    keys, values = (
        half.unflatten(1, (HEADS, SIZE, DIM)) for half in huge(2 * BLOCK).split(BLOCK, dim=1)
    )
    rows = torch.randn(1, HEADS, DIM).bfloat16()

    write_cache(keys, values, rows, -rows, torch.tensor([len(keys) * SIZE - 1]))

    assert torch.equal(keys[-1, :, -1], rows[0])
    assert torch.equal(values[-1, :, -1], -rows[0])


def test_the_highest_blocks_are_copied_gathered_and_scattered() -> None:
    storage = huge(BLOCK)
    last = len(storage) - 1
    storage[last] = torch.randn(BLOCK).bfloat16()
    out = torch.zeros(1, BLOCK, dtype=torch.bfloat16)

    copy_blocks(storage, torch.tensor([last]), torch.tensor([last - 1]))
    gather_blocks(storage, torch.tensor([last - 1]), out)
    scatter_blocks(storage, torch.tensor([last - 2]), out)

    assert torch.equal(out[0], storage[last])
    assert torch.equal(storage[last - 2], storage[last])


@pytest.mark.parametrize("apart", [2**30 - 64, 2**31 - 64, 2**31 + 64])
def test_lora_reads_and_writes_rows_that_lie_far_apart(apart: int) -> None:
    def two_rows(width: int) -> Tensor:
        memory = torch.empty(apart + width, dtype=torch.bfloat16)
        rows = memory.as_strided((2, width), (apart, 1))
        return rows.copy_(torch.randn(2, width))

    x, out = two_rows(48), two_rows(64)
    a, b = torch.randn(4, 48).bfloat16(), torch.randn(64, 4).bfloat16()
    batch = LoRABatch.build([-1, 0])
    assert batch is not None
    table, oracle, expected = cpu.LoRATable(1, torch.bfloat16), naive.LoRATable(1), out.clone()
    for each in (table, oracle):
        each.set(0, LoRAOperand(a, (LoRASlice(0, b, 0.5),)))
    naive.add_lora(expected, x, oracle, batch)

    cpu.add_lora(out, x, table, batch)

    torch.testing.assert_close(out, expected)
