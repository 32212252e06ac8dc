"""Paged attention: odd shapes in every dtype, then the sizes of real decoding and prefill."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from gpu.case import FLOORS, Case, Goal, Machine, Timed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from loraplex.kernels.attention import naive
from loraplex.kernels.attention import triton as ours
from loraplex.kernels.attention.spans import QuerySpans

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_CHECKED_ROWS = 256  # at each end of a long prefill: the oracle makes whole score matrices
_PEERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True)
class Shape:
    lengths: tuple[int, ...]  # cached tokens of each sequence
    queries: tuple[int, ...]  # how many of them, the last, are asked in this step
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    value_dim: int | None = None  # None: as `dim`
    block: int = 16
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def seen(self) -> int:
        """Keys that each query sees, summed over all queries."""
        return sum(
            min(length - queries + 1 + i, self.window or length)
            for length, queries in zip(self.lengths, self.queries, strict=True)
            for i in range(queries)
        )

    @property
    def touched(self) -> int:
        """Cached tokens that are read, each once."""
        return sum(
            min(length, (self.window or length) + queries - 1)
            for length, queries in zip(self.lengths, self.queries, strict=True)
        )


@dataclass(frozen=True)
class Paged:
    """A poisoned cache: NaN wherever no token lies, and in the block that unused entries name."""

    shape: Shape
    query: Tensor  # [T, H, D]
    keys: Tensor  # [N, KVH, BS, D], a view of rows that hold keys and values
    values: Tensor
    tables: Tensor  # [S, B] int64
    spans: QuerySpans
    sinks: Tensor | None

    @classmethod
    def make(cls, shape: Shape, device: torch.device) -> "Paged":
        generator = torch.Generator(device).manual_seed(0)

        def random(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=device).to(shape.dtype)

        value_dim = shape.value_dim or shape.dim
        needed = [-(-length // shape.block) for length in shape.lengths]
        order = torch.randperm(sum(needed) + 3, generator=generator, device=device)
        split = shape.kv_heads * shape.block * shape.dim
        row = split + shape.kv_heads * shape.block * value_dim
        storage = torch.full((len(order), row), math.nan, dtype=shape.dtype, device=device)
        storage[order[: sum(needed)]] = random(sum(needed), row)
        keys = storage[:, :split].view(-1, shape.kv_heads, shape.block, shape.dim)
        values = storage[:, split:].view(-1, shape.kv_heads, shape.block, value_dim)
        width = max(needed, default=0) + 1
        tables = order[-1].repeat(len(needed), width)
        starts = [0, *accumulate(needed)]
        for s, (length, count) in enumerate(zip(shape.lengths, needed, strict=True)):
            tables[s, :count] = order[starts[s] : starts[s + 1]]
            if tail := length % shape.block:
                keys[tables[s, count - 1], :, tail:] = math.nan
                values[tables[s, count - 1], :, tail:] = math.nan
        return cls(
            shape,
            random(sum(shape.queries), shape.heads, shape.dim),
            keys,
            values,
            tables,
            QuerySpans.of([0, *accumulate(shape.queries)], shape.lengths, device),
            random(shape.heads) if shape.sinks else None,
        )

    def attend(self, attend: Callable[..., Tensor], query: Tensor, spans: QuerySpans) -> Tensor:
        shape = self.shape
        return attend(
            query,
            self.keys,
            self.values,
            self.tables,
            spans,
            shape.dim**-0.5,
            window=shape.window,
            softcap=shape.softcap,
            sinks=self.sinks,
        )

    def ours(self) -> Tensor:
        return self.attend(ours.paged_attention, self.query, self.spans)

    def expected(self) -> Tensor:
        return self.attend(naive.paged_attention, self.query.float(), self.spans)

    def expected_ends(self) -> Tensor:
        """Of one long prefill: its first and its last rows."""
        length = self.shape.lengths[0]
        n = min(_CHECKED_ROWS, len(self.query))
        first = length - len(self.query) + n
        head = self.attend(naive.paged_attention, self.query[:n].float(), _one(n, first, self))
        tail = self.attend(naive.paged_attention, self.query[-n:].float(), _one(n, length, self))
        return torch.cat([head, tail])

    def ours_ends(self) -> Tensor:
        return self.ends(self.ours())

    def ends(self, out: Tensor) -> Tensor:
        """The rows that `expected_ends` has, of the result for all queries."""
        n = min(_CHECKED_ROWS, len(self.query))
        return torch.cat([out[:n], out[-n:]])


def _one(queries: int, length: int, paged: Paged) -> QuerySpans:
    return QuerySpans.of([0, queries], [length], paged.query.device)


def decode(machine: Machine) -> Iterator[Case]:
    for dtype in DTYPES:
        for name, shape in _odd_shapes(_tiny(dtype) if machine.interpreted else _large(dtype)):
            yield _checked(f"{_short(dtype)}, {name}", shape, machine)
    if not machine.interpreted:
        yield from _timed_decodes(machine)


def _tiny(dtype: torch.dtype) -> Shape:
    return Shape((), (), heads=4, kv_heads=2, dim=16, block=4, dtype=dtype)


def _large(dtype: torch.dtype) -> Shape:
    return Shape((), (), dtype=dtype)


def _odd_shapes(base: Shape) -> Iterator[tuple[str, Shape]]:
    """Small changes to `base`, in which every length beside a block's end occurs."""
    size = base.block
    lengths = (0, 1, size - 1, size, size + 1, 8 * size + 3, 0)
    ones = tuple(min(1, length) for length in lengths)
    edge = replace(base, lengths=lengths, queries=ones)
    long = replace(base, lengths=(40 * size + 1, 1), queries=(1, 1))
    yield "block edges and padding", edge
    yield "many splits beside an empty one", long
    yield (
        "chunks that begin inside a block",
        replace(edge, queries=(0, 1, size - 1, 1, 2, 3 * size, 0)),
    )
    yield "window of a block", replace(long, window=size)
    yield "window of one token", replace(edge, window=1)
    yield "soft-cap and sinks", replace(edge, softcap=2.0, sinks=True)
    yield "one KV head for all", replace(edge, kv_heads=1)
    yield "five query heads to one", replace(edge, heads=5 * base.kv_heads)
    yield "values narrower than keys", replace(edge, value_dim=base.dim // 2)
    for dim in (80, 96, 256):
        yield f"heads of {dim}", replace(edge, heads=4, kv_heads=2, dim=dim)


def _checked(name: str, shape: Shape, machine: Machine) -> Case:
    paged = Paged.make(shape, machine.device)
    return Case(name, paged.ours, paged.expected, FLOORS[shape.dtype])


def _timed_decodes(machine: Machine) -> Iterator[Case]:
    most = Goal(0.80)
    for count, length, goal in (
        (1, 1024, Goal(1, at_most=10e-6)),
        (1, 32768, Goal(0.55)),
        (8, 4096, Goal(0.55)),
        (32, 4096, most),
        (64, 2048, most),
        (128, 2048, most),
    ):
        yield _timed_decode(Shape((length,) * count, (1,) * count), goal, machine)
    yield _timed_decode(Shape((4096,) * 32, (1,) * 32, block=8), most, machine)
    yield _timed_decode(Shape((32768,) * 32, (1,) * 32, window=4096), Goal(0.64), machine)
    yield _timed_decode(Shape((4096,) * 32, (1,) * 32, heads=8, dim=256), most, machine)


def _timed_decode(shape: Shape, goal: Goal, machine: Machine) -> Case:
    paged = Paged.make(shape, machine.device)
    name = f"decode {len(shape.lengths)} x {shape.lengths[0]}, {_layout(shape)}"
    timed = Timed(
        paged.ours,
        attention_bytes(shape),
        attention_flops(shape),
        goal=goal,
        peers=_peers(shape, machine),
    )
    return Case(name, paged.ours, paged.expected, FLOORS[shape.dtype], timed)


def prefill(machine: Machine) -> Iterator[Case]:
    if machine.interpreted:
        yield _prefill(_longer(_tiny(torch.bfloat16), 24, 24), Goal(1), machine)
        yield _prefill(_longer(_tiny(torch.float32), 30, 7), Goal(1), machine)
        return
    base = Shape((), ())
    yield _prefill(_longer(base, 4096, 4096), Goal(0.45), machine)
    yield _prefill(_longer(base, 16384, 16384), Goal(0.45), machine)
    yield _prefill(_longer(base, 8192, 512), Goal(0.35), machine)
    yield _prefill(_longer(replace(base, block=8), 4096, 4096), Goal(0.45), machine)
    yield _prefill(_longer(replace(base, heads=8, dim=256), 4096, 4096), Goal(0.40), machine)
    ragged = tuple(range(100, 1000, 57))
    yield _checked("ragged prefill", replace(base, lengths=ragged, queries=ragged), machine)


def _longer(shape: Shape, length: int, queries: int) -> Shape:
    return replace(shape, lengths=(length,), queries=(queries,))


def _prefill(shape: Shape, goal: Goal, machine: Machine) -> Case:
    paged = Paged.make(shape, machine.device)
    name = f"{shape.queries[0]} queries of {shape.lengths[0]}, {_layout(shape)}"
    timed = None
    if not machine.interpreted:
        peers = _peers(shape, machine)
        timed = Timed(
            paged.ours, attention_bytes(shape), attention_flops(shape), goal=goal, peers=peers
        )
    return Case(name, paged.ours_ends, paged.expected_ends, FLOORS[shape.dtype], timed)


def _layout(shape: Shape) -> str:
    window = f", window {shape.window}" if shape.window else ""
    heads = f"{shape.heads}/{shape.kv_heads} heads of {shape.dim}"
    return f"{heads}, blocks of {shape.block}, {_short(shape.dtype)}{window}"


def attention_bytes(shape: Shape) -> float:
    cached = shape.touched * shape.kv_heads * (shape.dim + (shape.value_dim or shape.dim))
    return (cached + 2 * sum(shape.queries) * shape.heads * shape.dim) * shape.dtype.itemsize


def attention_flops(shape: Shape) -> float:
    return 2 * shape.seen * shape.heads * (shape.dim + (shape.value_dim or shape.dim))


def _peers(shape: Shape, machine: Machine) -> dict[str, Callable[[], object]]:
    """torch's own attention over keys and values that lie in one piece; no window."""
    sequences, queries, length = len(shape.lengths), shape.queries[0], shape.lengths[0]
    if shape.window or queries not in (1, length):
        return {}
    options = {"dtype": shape.dtype, "device": machine.device}
    query = torch.randn(sequences, shape.heads, queries, shape.dim, **options)
    key, value = torch.randn(2, sequences, shape.kv_heads, length, shape.dim, **options)

    def run(backend: SDPBackend) -> None:
        with sdpa_kernel(backend):
            scaled_dot_product_attention(query, key, value, is_causal=queries > 1, enable_gqa=True)

    return {name: lambda backend=backend: run(backend) for name, backend in _PEERS.items()}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
