"""What is timed: each operation at the shapes of Gemma 3 270M, native and naive."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.kernels.attention import cpu as attention_cpu
from loraplex.kernels.attention import naive as attention_naive
from loraplex.kernels.attention.spans import QuerySpans
from loraplex.kernels.gated_activation import cpu as gated_activation_cpu
from loraplex.kernels.gated_activation import naive as gated_activation_naive
from loraplex.kernels.int8_linear import cpu as int8_linear_cpu
from loraplex.kernels.kv_cache import cpu as kv_cache_cpu
from loraplex.kernels.kv_cache import naive as kv_cache_naive
from loraplex.kernels.linear import cpu as linear_cpu
from loraplex.kernels.linear import naive as linear_naive
from loraplex.kernels.lora import cpu as lora_cpu
from loraplex.kernels.lora import naive as lora_naive
from loraplex.kernels.lora.batch import LoRABatch
from loraplex.kernels.lora.operands import LoRAOperand, LoRASlice, LoRATable
from loraplex.kernels.native.huge_pages import HugePages
from loraplex.kernels.rms_norm import cpu as rms_norm_cpu
from loraplex.kernels.rms_norm import naive as rms_norm_naive
from loraplex.kernels.rotary import cpu as rotary_cpu
from loraplex.kernels.rotary import naive as rotary_naive

BF16 = torch.bfloat16
COLD = 100 * 2**20  # bytes of weights to go through, so that they come from memory as in a step
HEADS, KV_HEADS, DIM, BLOCK = 4, 1, 256, 16


@dataclass(frozen=True)
class Case:
    """One operation at one shape; each function runs it `times` times."""

    label: str
    num_bytes: float  # that one run must read, each once
    flops: float
    native: Callable[[], object]
    naive: Callable[[], object]
    times: int = 1


def cases() -> Iterator[Case]:
    """Made one by one, so that the memory of one is free before the next."""
    for shape in ((2048, 640), (640, 2048), (262144, 640)):
        for rows in (1, 8, 16, 32, 320):
            yield linear(rows, *shape)
            yield int8_linear(rows, *shape)
    for lengths, queries, window in (
        ([352], 1, None),
        ([352] * 8, 1, None),
        ([4096] * 8, 1, None),
        ([4096] * 8, 1, 512),
        ([320], 320, None),
        ([1056], 1056, None),
        ([1056], 1056, 512),
        ([1056], 32, None),
    ):
        yield attention(lengths, queries, window)
    for adapters, rows in ((1, 1), (8, 1), (1, 8), (16, 1), (1, 320), (1, 1056)):
        yield lora(adapters, rows)
    for tokens in (8, 320):
        yield cache_write(tokens)
        yield rms_norm(tokens)
        yield rotary(tokens)
        yield gated_activation(tokens)
    yield gather(64)


def linear(rows: int, outputs: int, inputs: int) -> Case:
    times = max(1, COLD // (outputs * inputs * 2))
    x = torch.randn(rows, inputs).to(BF16)
    weights = [torch.randn(outputs, inputs).to(BF16) for _ in range(times)]
    memory = HugePages((outputs + 32) * inputs * 2 * times)
    packed = [linear_cpu.PackedWeight.pack(weight, memory) for weight in weights]
    return Case(
        f"linear {inputs} -> {outputs}, {rows} rows",
        outputs * inputs * 2,
        2 * rows * outputs * inputs,
        lambda: [linear_cpu.linear(x, weight) for weight in packed],
        lambda: [linear_naive.linear(x, weight) for weight in weights],
        times,
    )


def int8_linear(rows: int, outputs: int, inputs: int) -> Case:
    times = max(1, COLD // (outputs * inputs))
    x = torch.randn(rows, inputs).to(BF16)
    weight = torch.randn(outputs, inputs).to(BF16)
    memory = HugePages((outputs + 32) * (inputs + 4) * times)
    packed = [int8_linear_cpu.Int8Weight.pack(weight, memory) for _ in range(times)]
    return Case(
        f"int8 linear {inputs} -> {outputs}, {rows} rows",
        outputs * inputs,
        rows * outputs * inputs,  # two integer operations take the time of one in bfloat16
        lambda: [int8_linear_cpu.linear(x, each) for each in packed],
        lambda: [linear_naive.linear(x, weight) for _ in range(times)],
        times,
    )


def attention(lengths: list[int], queries: int, window: int | None) -> Case:
    """The last `queries` tokens of each sequence, over blocks that lie in random order."""
    needed = -(-lengths[0] // BLOCK)
    touched = min(lengths[0], (window or lengths[0]) + queries - 1) * len(lengths)
    num_bytes = touched * KV_HEADS * DIM * 2 * 2
    times = max(1, COLD // num_bytes) if queries == 1 else 1
    shape = (needed * len(lengths), 2 * KV_HEADS * BLOCK * DIM)
    layers = [HugePages(2 * math.prod(shape)).empty(*shape, dtype=BF16) for _ in range(times)]
    views = [layer.normal_().view(-1, 2, KV_HEADS, BLOCK, DIM).unbind(1) for layer in layers]
    tables = torch.randperm(needed * len(lengths)).view(len(lengths), needed)
    query = torch.randn(queries * len(lengths), HEADS, DIM).to(BF16)
    starts = [i * queries for i in range(len(lengths) + 1)]
    rest = (tables, QuerySpans.of(starts, lengths), DIM**-0.5, window)
    reach = window or lengths[0]
    seen = sum(min(reach, lengths[0] - queries + 1 + i) for i in range(queries)) * len(lengths)
    return Case(
        f"attention {len(lengths)} x {queries} of {lengths[0]}"
        + (f", window {window}" if window else ""),
        num_bytes,
        seen * HEADS * DIM * 2 * 2,
        lambda: [attention_cpu.paged_attention(query, *layer, *rest) for layer in views],
        lambda: [attention_naive.paged_attention(query, *layer, *rest) for layer in views],
        times,
    )


def lora(adapters: int, rows: int) -> Case:
    """Rank 16 on the fused gate and up projections, `rows` rows of each adapter."""
    times = max(1, COLD // (adapters * (32 * 640 + 4096 * 16) * 2)) if rows < 100 else 1
    x, out = torch.randn(adapters * rows, 640).to(BF16), torch.randn(adapters * rows, 4096).to(BF16)
    batch = LoRABatch.build(torch.arange(adapters).repeat_interleave(rows).numpy())
    operands = [[_operand() for _ in range(adapters)] for _ in range(times)]
    native = [_table(lora_cpu.LoRATable(adapters, BF16), layer) for layer in operands]
    plain = [_table(lora_naive.LoRATable(adapters), layer) for layer in operands]
    return Case(
        f"LoRA 640 -> 4096 rank 16, {adapters} adapters x {rows} rows",
        adapters * 16 * (2 * 640 + 4096) * 2,
        2 * adapters * rows * 16 * (2 * 640 + 4096),
        lambda: [lora_cpu.add_lora(out, x, table, batch) for table in native],
        lambda: [lora_naive.add_lora(out, x, table, batch) for table in plain],
        times,
    )


def _table(table: LoRATable, operands: list[LoRAOperand]) -> LoRATable:
    for slot, operand in enumerate(operands):
        table.set(slot, operand)
    return table


def _operand() -> LoRAOperand:
    def random(*shape: int) -> Tensor:
        return (torch.randn(shape) / 100).to(BF16)

    slices = (LoRASlice(0, random(2048, 16), 1.0), LoRASlice(2048, random(2048, 16), 1.0))
    return LoRAOperand(random(32, 640), slices)


def cache_write(tokens: int) -> Case:
    caches = torch.zeros(2, 1000, KV_HEADS, BLOCK, DIM, dtype=BF16).unbind()
    rows = torch.randn(2, tokens, KV_HEADS, DIM).to(BF16).unbind()
    slots = torch.randperm(16000)[:tokens]
    return Case(
        f"cache write, {tokens} tokens",
        rows[0].nbytes * 4,
        0,
        lambda: kv_cache_cpu.write_cache(*caches, *rows, slots),
        lambda: kv_cache_naive.write_cache(*caches, *rows, slots),
    )


def rms_norm(rows: int) -> Case:
    x, weight = torch.randn(rows, 640).to(BF16), torch.ones(640)
    return Case(
        f"RMS norm, {rows} rows",
        x.nbytes * 2,
        0,
        lambda: rms_norm_cpu.rms_norm(x, weight, 1e-6),
        lambda: rms_norm_naive.rms_norm(x, weight, 1e-6),
    )


def rotary(tokens: int) -> Case:
    projected = torch.randn(1, tokens, HEADS + KV_HEADS, DIM).to(BF16).transpose(1, 2)
    query, key = projected[:, :HEADS], projected[:, HEADS:]
    angles = torch.randn(1, tokens, DIM)
    rest = angles.cos().to(BF16), angles.sin().to(BF16)
    return Case(
        f"rotary embedding, {tokens} tokens",
        2 * (projected.nbytes + angles.numel() * 2),
        0,
        lambda: rotary_cpu.rotate(query, key, *rest),
        lambda: rotary_naive.rotate(query, key, *rest),
    )


def gather(blocks: int) -> Case:
    """As a sequence that is offloaded, of one group of layers."""
    shape = (blocks * 16, 18 * 2 * KV_HEADS * BLOCK * DIM)
    storage = HugePages(2 * math.prod(shape)).empty(*shape, dtype=BF16).zero_()
    out = torch.empty(blocks, shape[1], dtype=BF16)
    ids = torch.randperm(shape[0])[:blocks]
    return Case(
        f"gather {blocks} blocks",
        out.nbytes * 2,
        0,
        lambda: kv_cache_cpu.gather_blocks(storage, ids, out),
        lambda: kv_cache_naive.gather_blocks(storage, ids, out),
    )


def gated_activation(rows: int) -> Case:
    x = torch.randn(rows, 4096).to(BF16)
    return Case(
        f"gated GELU, {rows} rows",
        x.nbytes * 1.5,
        0,
        lambda: gated_activation_cpu.gated_gelu_tanh(x),
        lambda: gated_activation_naive.gated_gelu_tanh(x),
    )
