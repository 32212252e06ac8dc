"""What breaks kernels in use: offsets beyond 32 bits, batches without rows, replayed launches."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from gpu.case import FLOORS, Case, Machine
from gpu.lora import Adapted, Site
from torch import Tensor

from loraplex.kernels.attention import naive as naive_attention
from loraplex.kernels.attention import triton as attention
from loraplex.kernels.attention.spans import QuerySpans
from loraplex.kernels.kv_cache import triton as kv_cache
from loraplex.kernels.lora import naive as naive_lora
from loraplex.kernels.lora import triton as lora
from loraplex.kernels.lora.batch import LoRABatch

HALF = torch.bfloat16
_BEYOND = 2**31 + 2**20  # numbers; 32-bit offsets end at 2**31


def robust(machine: Machine) -> Iterator[Case]:
    yield from _high_blocks(machine)
    yield _high_rows(machine)
    yield from _without_rows(machine)
    yield _replayed_attention(machine)
    yield _replayed_lora(machine)


def _high_blocks(machine: Machine) -> Iterator[Case]:
    """A sequence in the last blocks of a huge cache gives what it gives in the first ones."""
    heads, block, dim = (2, 4, 16) if machine.interpreted else (8, 16, 128)
    row = 2 * heads * block * dim
    blocks = 64 if machine.interpreted else _BEYOND // row + 16
    storage = torch.empty(blocks, row, dtype=HALF, device=machine.device)
    keys = storage[:, : row // 2].view(blocks, heads, block, dim)
    values = storage[:, row // 2 :].view(blocks, heads, block, dim)
    low = torch.arange(8, device=machine.device)
    high = blocks - 1 - low
    length = 7 * block - 1
    tokens = torch.randn(2, length, heads, dim, device=machine.device).to(HALF)

    def at(ids: Tensor, queries: int) -> Tensor:
        storage[low], storage[high] = math.nan, math.nan
        slots = (ids[:, None] * block + torch.arange(block, device=ids.device)).flatten()
        kv_cache.write_cache(keys, values, tokens[0], tokens[1], slots[:length])
        query = tokens[0, -queries:].repeat_interleave(4, dim=1)
        spans = QuerySpans.of([0, queries], [length], machine.device)
        return attention.paged_attention(query, keys, values, ids[None], spans, dim**-0.5)

    for queries in (1, 7):
        yield Case(
            f"attention and cache write beyond 2^31 numbers, {queries} queries",
            lambda queries=queries: at(high, queries),
            lambda queries=queries: at(low, queries),
            0,
        )

    def moved() -> Tensor:
        storage[low] = torch.arange(row, device=machine.device).to(HALF)
        kv_cache.copy_blocks(storage, low, high)
        out = torch.empty(8, row, dtype=HALF, device=machine.device)
        kv_cache.gather_blocks(storage, high, out)
        kv_cache.scatter_blocks(storage, low, out + 1)
        return torch.cat([out, storage[low]])

    def expected() -> Tensor:
        numbers = torch.arange(row, device=machine.device).to(HALF).expand(8, row)
        return torch.cat([numbers, numbers + 1])

    yield Case("blocks moved beyond 2^31 numbers", moved, expected, 0)


def _high_rows(machine: Machine) -> Case:
    """LoRA on a row behind 2**31 numbers gives what it gives on the first row."""
    site = Site(64, (48,)) if machine.interpreted else Site(4096, (28672,))
    count = 70 if machine.interpreted else _BEYOND // 28672 + 100
    slots = [0, *[-1] * (count - 2), 0]
    adapted = Adapted(site, [16], slots, HALF, machine.device)
    adapted.x[-1] = adapted.x[0]

    def row(index: int) -> Tensor:
        adapted.out.zero_()
        adapted.again()
        return adapted.out[index][None].clone()

    return Case("LoRA on rows beyond 2^31 numbers", lambda: row(-1), lambda: row(0), 0)


def _without_rows(machine: Machine) -> Iterator[Case]:
    site = Site(64, (40, 24))
    adapted = Adapted(site, [8, 4], [0, 1, 0], HALF, machine.device)
    before = torch.randn(3, 64, device=machine.device).to(HALF)
    padding = LoRABatch.build([0, 1, 0], machine.device, capacity=3)
    for tensor, value in ((padding.token_slots, -1), (padding.rows, -1), (padding.slots, -1)):
        tensor.fill_(value)
    padding.starts.zero_()

    def add(batch: LoRABatch, rows: int) -> Tensor:
        out = before[:rows].clone()
        lora.add_lora(out, adapted.x[:rows], adapted.table, batch)
        return out

    yield Case("LoRA on padding only", lambda: add(padding, 3), lambda: before, 0)
    none = (padding.token_slots[:0], padding.rows[:0], padding.slots[:0], padding.starts[:1])
    empty = LoRABatch(*none)
    yield Case("LoRA on no rows", lambda: add(empty, 0), lambda: before[:0], 0)
    adapted_now = Adapted(site, [8, 4], [0, 1, 0], HALF, machine.device)
    adapted_now.table.set(1, None)

    def with_an_empty_slot() -> Tensor:
        out = before.clone()
        lora.add_lora(out, adapted_now.x, adapted_now.table, adapted_now.batch)
        return out[1:2]

    yield Case("LoRA with an empty slot", with_an_empty_slot, lambda: before[1:2], 0)


@dataclass(frozen=True)
class Replay:
    """A launch that is recorded once, with what `begin` put into its tensors, and then replayed."""

    launch: Callable[[], Tensor]
    begin: Callable[[], object]
    change: Callable[[], object]

    def run(self, machine: Machine) -> Tensor:
        """The result of a replay after `change`; where there is no GPU, of a second launch."""
        self.begin()
        if machine.interpreted:
            self.launch()
            self.change()
            return self.launch()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.launch()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.launch()
        self.change()
        graph.replay()
        return out.clone()


def _replayed_attention(machine: Machine) -> Case:
    """Recorded with padding alone; replayed with contexts of all lengths."""
    block, dim = (4, 16) if machine.interpreted else (16, 128)
    most = 6 * block if machine.interpreted else 4096
    count, width = 4, most // block
    options = {"dtype": HALF, "device": machine.device}
    storage = torch.randn(2, count * width, 2, block, dim, **options)
    query = torch.randn(count, 8, dim, **options)
    tables = torch.randperm(count * width, device=machine.device).view(count, width)
    starts = torch.arange(count + 1, device=machine.device)
    lengths = torch.zeros(count, dtype=torch.int64, device=machine.device)
    now = torch.tensor([1, most, 0, most // 2 + 1], device=machine.device)
    spans = QuerySpans(starts, lengths, 1, most)
    replay = Replay(
        lambda: attention.paged_attention(query, *storage, tables, spans, dim**-0.5),
        lengths.zero_,
        lambda: lengths.copy_(now),
    )

    def expected() -> Tensor:
        exact = QuerySpans.of(starts.tolist(), now.tolist(), machine.device)
        return naive_attention.paged_attention(query.float(), *storage, tables, exact, dim**-0.5)

    name = "attention recorded and replayed"
    return Case(name, lambda: replay.run(machine), expected, FLOORS[HALF])


def _replayed_lora(machine: Machine) -> Case:
    """Recorded with one adapter; replayed with as many as there are rows."""
    site = Site(48, (40, 24)) if machine.interpreted else Site(2048, (2048, 512, 512))
    count = 5 if machine.interpreted else 64
    ranks = [1 + 7 * i % 64 for i in range(count)]
    adapted = Adapted(site, ranks, range(count), HALF, machine.device)
    batch = LoRABatch.build([0] * count, machine.device, capacity=count)
    first = LoRABatch.build([0] * count, machine.device, capacity=count)
    many = LoRABatch.build([*range(count - 1), -1], machine.device, capacity=count)

    def refresh(source: LoRABatch) -> None:
        for name in ("token_slots", "rows", "slots", "starts"):
            getattr(batch, name).copy_(getattr(source, name))

    def launch() -> Tensor:
        out = torch.zeros_like(adapted.out)
        lora.add_lora(out, adapted.x, adapted.table, batch)
        return out

    def expected() -> Tensor:
        out = torch.zeros_like(adapted.out)
        table = naive_lora.LoRATable(count)
        for slot, operand in enumerate(adapted.operands):
            table.set(slot, operand)
        naive_lora.add_lora(out, adapted.x, table, many)
        return out

    replay = Replay(launch, lambda: refresh(first), lambda: refresh(many))
    return Case("LoRA recorded and replayed", lambda: replay.run(machine), expected, FLOORS[HALF])
