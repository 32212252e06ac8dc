"""A ragged batch over a poisoned paged cache, for tests of attention."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.kernels.attention.spans import QuerySpans

NAN = float("nan")


@dataclass(frozen=True)
class Layout:
    """The shape of one attention layer and of its cache."""

    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 32
    value_dim: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class PagedBatch:
    query: Tensor  # [T, H, Dk], not contiguous, as a transposed projection is
    key_cache: Tensor  # [N, KVH, BS, Dk] views of one storage, as in the engine
    value_cache: Tensor  # [N, KVH, BS, Dv]
    block_tables: Tensor  # [S, B]; entries that no token needs point at a block of NaN
    query_start: list[int]
    seq_lens: list[int]

    def float(self) -> "PagedBatch":
        return PagedBatch(
            self.query.float(),
            self.key_cache.float(),
            self.value_cache.float(),
            self.block_tables,
            self.query_start,
            self.seq_lens,
        )

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, QuerySpans]:
        return (self.query, self.key_cache, self.value_cache, self.block_tables, self.spans)

    @property
    def spans(self) -> QuerySpans:
        return QuerySpans.of(self.query_start, self.seq_lens, self.query.device)

    def to(self, device: torch.device) -> "PagedBatch":
        tensors = (self.query, self.key_cache, self.value_cache, self.block_tables)
        moved = (tensor.to(device) for tensor in tensors)
        return PagedBatch(*moved, self.query_start, self.seq_lens)


def paged_batch(
    layout: Layout, seq_lens: list[int], num_queries: list[int], window: int | None = None
) -> PagedBatch:
    """Random tokens in shuffled blocks. Whatever no query may read is NaN: block 0, the tails of
    last blocks, and whole blocks behind the window."""
    generator = torch.Generator().manual_seed(sum(seq_lens))
    size = layout.block_size
    needed = [-(-length // size) for length in seq_lens]
    num_blocks = sum(needed) + 1
    split = layout.kv_heads * size * layout.key_dim
    whole = split + layout.kv_heads * size * layout.value_dim
    storage = torch.full((num_blocks, whole), NAN, dtype=layout.dtype)
    keys = storage[:, :split].unflatten(1, (layout.kv_heads, size, layout.key_dim))
    values = storage[:, split:].unflatten(1, (layout.kv_heads, size, layout.value_dim))
    ids = iter((torch.randperm(num_blocks - 1, generator=generator) + 1).tolist())
    tables = torch.zeros(len(seq_lens), max(needed, default=0), dtype=torch.int64)
    for s, (length, queries) in enumerate(zip(seq_lens, num_queries, strict=True)):
        oldest = 0 if window is None else max(0, length - queries - window + 1)
        for b in range(oldest // size, needed[s]):
            block = tables[s, b] = next(ids)
            filled = min(size, length - b * size)
            for cache, dim in ((keys, layout.key_dim), (values, layout.value_dim)):
                shape = (layout.kv_heads, filled, dim)
                cache[block, :, :filled] = torch.randn(shape, generator=generator)
    starts = [0, *torch.tensor(num_queries, dtype=torch.int64).cumsum(0).tolist()]
    query = torch.randn(layout.heads, starts[-1], layout.key_dim, generator=generator)
    return PagedBatch(
        query.to(layout.dtype).transpose(0, 1), keys, values, tables, starts, list(seq_lens)
    )
