"""Paged attention in plain torch equals dense attention in float64, whatever the layout."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.kernels.paged import Layout, paged_batch
from torch import Tensor

from loraplex.kernels.attention.naive import paged_attention
from loraplex.kernels.attention.spans import QuerySpans
from loraplex.kernels.kv_cache.naive import write_cache

BLOCK = 4
RAGGED = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 2]


@dataclass(frozen=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    key_dim: int = 8
    value_dim: int = 8


@dataclass(frozen=True)
class Paged:
    """Sequences scattered over a cache, and the same numbers in dense form."""

    query: list[Tensor]  # per sequence [L, H, Dk]
    keys: list[Tensor]  # per sequence [L, KVH, Dk]
    values: list[Tensor]  # per sequence [L, KVH, Dv]
    key_cache: Tensor
    value_cache: Tensor
    tables: Tensor

    def attend(self, num_queries: list[int], **options: Any) -> list[Tensor]:
        """Attends the last `num_queries` tokens of each sequence."""
        rows = [q[len(q) - n :] for q, n in zip(self.query, num_queries, strict=True)]
        starts = [0, *torch.tensor(num_queries).cumsum(0).tolist()]
        out = paged_attention(
            torch.cat(rows),
            self.key_cache,
            self.value_cache,
            self.tables,
            QuerySpans.of(starts, [len(q) for q in self.query]),
            0.3,
            **options,
        )
        return list(out.split(num_queries))


def paged(
    lengths: list[int], shape: Shape | None = None, block: int = BLOCK, filler: float = float("nan")
) -> Paged:
    """Random sequences, in blocks in random order; every unused slot holds the filler."""
    shape = shape or Shape()
    generator = torch.Generator().manual_seed(len(lengths) * 100 + sum(lengths))

    def noise(length: int, heads: int, dim: int) -> Tensor:
        return torch.randn(length, heads, dim, generator=generator)

    query = [noise(n, shape.num_heads, shape.key_dim) for n in lengths]
    keys = [noise(n, shape.num_kv_heads, shape.key_dim) for n in lengths]
    values = [noise(n, shape.num_kv_heads, shape.value_dim) for n in lengths]
    needed = [-(-n // block) for n in lengths]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, generator=generator)
    key_cache = torch.full((num_blocks, shape.num_kv_heads, block, shape.key_dim), filler)
    value_cache = torch.full((num_blocks, shape.num_kv_heads, block, shape.value_dim), filler)
    tables = torch.full((len(lengths), max(needed, default=0) + 1), int(order[-1]))
    for s, blocks in enumerate(order[: sum(needed)].split(needed)):
        tables[s, : len(blocks)] = blocks
        positions = torch.arange(lengths[s])
        slots = blocks[positions // block] * block + positions % block
        write_cache(key_cache, value_cache, keys[s], values[s], slots)
    return Paged(query, keys, values, key_cache, value_cache, tables)


def dense(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Every query one by one, in float64. query [Q, H, Dk], the last Q of the L keys' tokens."""
    group = query.shape[1] // keys.shape[1]
    out = torch.empty(query.shape[0], query.shape[1], values.shape[-1], dtype=torch.double)
    for row in range(query.shape[0]):
        position = keys.shape[0] - query.shape[0] + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(query.shape[1]):
            seen = keys[first : position + 1, head // group].double()
            scores = seen @ query[row, head].double() * 0.3
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            logits = (
                scores if sinks is None else torch.cat([scores, sinks[head : head + 1].double()])
            )
            weights = torch.softmax(logits, dim=0)[: len(scores)]
            out[row, head] = weights @ values[first : position + 1, head // group].double()
    return out


def assert_equals_dense(batch: Paged, num_queries: list[int], **options: Any) -> None:
    for s, found in enumerate(batch.attend(num_queries, **options)):
        query = batch.query[s][len(batch.query[s]) - num_queries[s] :]
        expected = dense(query, batch.keys[s], batch.values[s], **options)
        torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("block", [1, 3, 4, 16])
def test_ragged_prompts_equal_dense_attention(block: int) -> None:
    lengths = [*RAGGED, block, block + 1, 2 * block + 1]

    assert_equals_dense(paged(lengths, block=block), lengths)


def test_one_token_each_equals_dense_attention() -> None:
    assert_equals_dense(paged(RAGGED), [1] * len(RAGGED))


def test_prompts_chunks_and_single_tokens_mix_in_one_batch() -> None:
    assert_equals_dense(paged([9, 14, 7, 5]), [9, 6, 1, 2])


@pytest.mark.parametrize(
    "shape",
    [
        Shape(num_heads=4, num_kv_heads=4),
        Shape(num_heads=6, num_kv_heads=2),
        Shape(num_heads=5, num_kv_heads=1),
        Shape(num_heads=1, num_kv_heads=1),
        Shape(key_dim=7, value_dim=7),
        Shape(key_dim=1, value_dim=1),
        Shape(key_dim=12, value_dim=5),
    ],
    ids=["mha", "gqa", "mqa", "one-head", "odd", "tiny", "wide-keys"],
)
def test_heads_of_any_number_and_size(shape: Shape) -> None:
    assert_equals_dense(paged(RAGGED, shape), RAGGED)
    assert_equals_dense(paged(RAGGED, shape), [1] * len(RAGGED))


@pytest.mark.parametrize("window", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 9, 100])
def test_a_window_shows_that_many_keys(window: int) -> None:
    assert_equals_dense(paged(RAGGED), RAGGED, window=window)
    assert_equals_dense(paged(RAGGED), [1] * len(RAGGED), window=window)


def test_a_soft_cap_bounds_the_scores() -> None:
    assert_equals_dense(paged(RAGGED), RAGGED, softcap=0.5)


def test_sinks_take_weight_and_give_nothing() -> None:
    sinks = torch.tensor([-30.0, 0.0, 2.0, 30.0])

    assert_equals_dense(paged(RAGGED), RAGGED, sinks=sinks)
    assert_equals_dense(paged(RAGGED), RAGGED, sinks=sinks, softcap=3.0, window=3)


def test_a_batch_is_every_sequence_alone() -> None:
    batch = paged(RAGGED)
    together = batch.attend(RAGGED)

    for s, length in enumerate(RAGGED):
        one = Paged(
            [batch.query[s]],
            [batch.keys[s]],
            [batch.values[s]],
            batch.key_cache,
            batch.value_cache,
            batch.tables[s : s + 1],
        )
        assert torch.equal(one.attend([length])[0], together[s])


@pytest.mark.parametrize("chunk", [1, 2, BLOCK, BLOCK + 1, 7])
@pytest.mark.parametrize("window", [None, 3, 6])
def test_chunks_give_what_the_whole_prompt_gives(chunk: int, window: int | None) -> None:
    length = 14
    batch = paged([length])
    whole = batch.attend([length], window=window)[0]

    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        part = Paged(
            [batch.query[0][:end]], [], [], batch.key_cache, batch.value_cache, batch.tables
        ).attend([end - start], window=window)[0]
        torch.testing.assert_close(part, whole[start:end])


@pytest.mark.parametrize("window", [None, 3])
def test_what_lies_in_unused_slots_and_blocks_is_never_read(window: int | None) -> None:
    outputs = [
        torch.cat(paged(RAGGED, filler=filler).attend(RAGGED, window=window))
        for filler in (float("nan"), float("inf"), 1e4, 0.0)
    ]

    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert outputs[0].isfinite().all()


def test_table_entries_behind_the_window_are_never_read() -> None:
    batch = paged([14])
    before = batch.attend([2], window=3)[0]
    poison = int(set(range(len(batch.key_cache))).difference(batch.tables[0].tolist()).pop())
    batch.tables[0, :2] = poison

    assert torch.equal(batch.attend([2], window=3)[0], before)


def test_a_sequence_without_queries_takes_no_rows() -> None:
    batch = paged([5, 6, 7])

    found = batch.attend([0, 2, 0])

    expected = dense(batch.query[1][-2:], batch.keys[1], batch.values[1])
    assert [len(rows) for rows in found] == [0, 2, 0]
    torch.testing.assert_close(found[1].double(), expected, atol=2e-6, rtol=1e-5)


def test_the_rows_of_padding_become_zeros() -> None:
    cache = torch.full((2, 2, BLOCK, 8), float("nan"))
    tables = torch.zeros(1, 1, dtype=torch.int64)

    out = paged_attention(
        torch.full((2, 4, 8), float("nan")), cache, cache, tables, QuerySpans.of([0, 2], [0]), 1.0
    )

    assert not out.any()


def test_no_sequences_give_no_rows() -> None:
    cache = torch.zeros(2, 2, BLOCK, 8)

    tables = torch.empty(0, 1, dtype=torch.int64)

    out = paged_attention(torch.empty(0, 4, 8), cache, cache, tables, QuerySpans.of([0], []), 1.0)

    assert out.shape == (0, 4, 8)


def test_very_large_scores_stay_exact() -> None:
    batch = paged(RAGGED)
    for query in batch.query:
        query.mul_(1e4)

    for s, found in enumerate(batch.attend(RAGGED)):
        assert found.isfinite().all()
        expected = dense(batch.query[s], batch.keys[s], batch.values[s])
        torch.testing.assert_close(found.double(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    batch = paged(RAGGED)
    half = Paged(
        [q.to(dtype) for q in batch.query],
        [k.to(dtype) for k in batch.keys],
        [v.to(dtype) for v in batch.values],
        batch.key_cache.to(dtype),
        batch.value_cache.to(dtype),
        batch.tables,
    )

    for s, found in enumerate(half.attend(RAGGED)):
        expected = dense(half.query[s], half.keys[s], half.values[s])
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected.to(dtype), atol=1e-3, rtol=8e-3)


def test_block_tables_of_any_integer_type_will_do() -> None:
    batch = paged(RAGGED)
    narrow = Paged(
        batch.query,
        batch.keys,
        batch.values,
        batch.key_cache,
        batch.value_cache,
        batch.tables.to(torch.int32),
    )

    assert torch.equal(torch.cat(narrow.attend(RAGGED)), torch.cat(batch.attend(RAGGED)))


@pytest.mark.parametrize("window", [None, 299])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_however_its_sequence_is_cut(
    dtype: torch.dtype, window: int | None
) -> None:
    length = 600
    batch = paged_batch(Layout(4, 2, 80, 80, dtype=dtype), [length], [length])
    options: dict[str, Any] = {"window": window, "softcap": 30.0}
    options["sinks"] = torch.tensor([-3.0, 0.0, 2.0, 80.0])
    at_once = paged_attention(*batch.arguments, 0.2, **options)

    cuts = [0, 1, 3, 12, 255, 256, 257, 300, 307, 512, 513, 598, 599, length]
    pieces = [
        paged_attention(
            batch.query[begin:end],
            *batch.arguments[1:4],
            QuerySpans.of([0, end - begin], [end]),
            0.2,
            **options,
        )
        for begin, end in pairwise(cuts)
    ]

    assert torch.equal(torch.cat(pieces), at_once)
