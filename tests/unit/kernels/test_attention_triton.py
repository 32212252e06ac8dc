"""Triton's paged attention against the naive one, over poisoned caches."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.paged import Layout, PagedBatch, paged_batch
from support.kernels.triton_interpreter import DEVICE
from torch import Tensor

from loraplex.kernels.attention import naive
from loraplex.kernels.attention.spans import QuerySpans
from loraplex.kernels.attention.tiling import Tiling, choose_tiling
from loraplex.kernels.attention.triton import attend, paged_attention

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.device]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SCALING = 0.2
SMALL = Tiling(rows=16, heads=2, keys=16, warps=4, stages=2)  # of `Layout`'s 4 and 2 heads
FIVE_TILES = [80, 65, 64, 17, 1]  # of SMALL's keys, at most


def assert_equals_naive(
    batch: PagedBatch, tiling: Tiling | None = None, tolerance: float = 0.0, **options: Any
) -> None:
    want = naive.paged_attention(*batch.float().arguments, SCALING, **options)
    batch = batch.to(DEVICE)

    if tiling is None:
        got = paged_attention(*batch.arguments, SCALING, **options)
    else:
        got = attend(tiling, *batch.arguments, SCALING, **options)

    assert got.dtype == batch.query.dtype
    tolerance = max(tolerance, TOLERANCE[got.dtype])
    torch.testing.assert_close(got.float().cpu(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (8, 2), (5, 1), (7, 1), (20, 1)])
def test_one_query_a_sequence(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    layout = Layout(*heads, block_size=8, dtype=dtype)

    assert_equals_naive(paged_batch(layout, [1, 7, 8, 9, 41], [1] * 5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "dims", [(16, 16), (17, 5), (64, 64), (80, 80), (96, 96), (192, 128), (256, 256)]
)
def test_heads_of_any_width(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    layout = Layout(2, 1, *dims, dtype=dtype)

    assert_equals_naive(paged_batch(layout, [20, 37], [1, 1]))
    assert_equals_naive(paged_batch(layout, [9, 34], [9, 20]))


@pytest.mark.parametrize("block_size", [1, 8, 12, 16, 32])
def test_blocks_of_any_size(block_size: int) -> None:
    layout = Layout(block_size=block_size)
    lengths = [block_size, block_size + 1, 2 * block_size - 1 or 1]

    assert_equals_naive(paged_batch(layout, lengths, lengths))
    assert_equals_naive(paged_batch(layout, lengths, [1, 1, 1]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prompts_chunks_and_single_tokens_mix_in_one_batch(dtype: torch.dtype) -> None:
    layout = Layout(6, 2, dtype=dtype)  # 3 heads a tile: 5 tokens in 16 rows, and a row idle

    assert_equals_naive(
        paged_batch(layout, [33, 40, 6, 50], [33, 7, 5, 1]), replace(SMALL, heads=3)
    )


@pytest.mark.parametrize("lengths", [[16], [8], [7, 9], [1, 0, 15, 17]])
def test_every_query_of_every_tile_is_computed(lengths: list[int]) -> None:
    assert_equals_naive(paged_batch(Layout(), lengths, lengths), SMALL)


@pytest.mark.parametrize("window", [1, 7, 16, 17, 100])
@pytest.mark.parametrize("chunk", [1, 20])
def test_a_window_hides_what_lies_behind_it(window: int, chunk: int) -> None:
    batch = paged_batch(Layout(block_size=8), [chunk, chunk + 1, chunk + 50], [chunk] * 3, window)

    assert_equals_naive(batch, SMALL, window=window)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [None, 3])
def test_whole_tiles_of_keys_may_be_hidden_from_a_query(splits: int, window: int | None) -> None:
    more_tokens_than_keys = Tiling(rows=32, heads=1, keys=16, warps=4, stages=2, splits=splits)

    assert_equals_naive(
        paged_batch(Layout(1, 1), [40, 25], [30, 25], window), more_tokens_than_keys, window=window
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 2, 3, 4, 8])
def test_keys_may_be_split_among_programs(dtype: torch.dtype, splits: int) -> None:
    batch = paged_batch(Layout(dtype=dtype), FIVE_TILES, [1] * 5)

    assert_equals_naive(batch, replace(SMALL, one_tile=True, splits=splits))


def test_more_splits_than_are_merged_at_once() -> None:
    batch = paged_batch(Layout(4, 1), [16 * 18], [1])
    batch.key_cache[batch.block_tables[0, -1]] *= 5  # the last split sees the highest scores

    assert_equals_naive(batch, Tiling(16, 4, 16, 4, 2, one_tile=True, splits=18))


@pytest.mark.parametrize("splits", [2, 4])
@pytest.mark.parametrize("window", [None, 33])
def test_keys_of_a_chunk_may_be_split_too(splits: int, window: int | None) -> None:
    batch = paged_batch(Layout(), [80, 30, 66], [9, 30, 1], window)

    assert_equals_naive(batch, replace(SMALL, splits=splits), window=window)


def test_a_share_of_keys_that_is_not_worth_a_program_is_left_to_others() -> None:
    batch = paged_batch(Layout(), FIVE_TILES, [1] * 5)

    assert_equals_naive(batch, replace(SMALL, splits=4, min_tiles=2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_soft_caps_and_sinks(dtype: torch.dtype, splits: int, softcap: float | None) -> None:
    batch = paged_batch(Layout(dtype=dtype), [60, 9], [3, 1], 20)
    sinks = torch.tensor([-3.0, 0.0, 2.0, 80.0]).to(dtype)

    assert_equals_naive(
        batch, replace(SMALL, splits=splits), softcap=softcap, window=20, sinks=sinks.to(DEVICE)
    )


def test_a_group_may_have_more_heads_than_a_tile() -> None:
    batch = paged_batch(Layout(10, 2), [40, 9], [1, 9])

    assert_equals_naive(batch, replace(SMALL, heads=2, splits=2))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("sinks", [None, torch.zeros(4)])
def test_rows_of_padding_become_zeros(splits: int, sinks: Tensor | None) -> None:
    batch = paged_batch(Layout(), [30, 0, 0], [1, 1, 3]).to(DEVICE)
    sinks = None if sinks is None else sinks.to(DEVICE)

    got = attend(replace(SMALL, splits=splits), *batch.arguments, SCALING, sinks=sinks)

    assert torch.equal(got[1:], torch.zeros_like(got[1:]))
    assert got[0].isfinite().all()


def test_a_sequence_without_queries_changes_nothing_beside_it() -> None:
    assert_equals_naive(paged_batch(Layout(), [50, 20, 30], [1, 0, 1]))
    assert_equals_naive(paged_batch(Layout(), [50, 20, 30], [12, 0, 9]), SMALL)


def test_an_empty_batch_gives_nothing() -> None:
    batch = paged_batch(Layout(), [], []).to(DEVICE)

    assert paged_attention(*batch.arguments, SCALING).shape == (0, 4, 32)


@pytest.mark.parametrize("chunk", [1, 20])
def test_huge_scores_do_not_overflow(chunk: int) -> None:
    batch = paged_batch(Layout(), [40, 25], [chunk, chunk])
    batch.query.mul_(1e3)

    assert_equals_naive(batch, tolerance=1e-2)  # float32 scores of 1e4 are good to 1e-3


def test_one_sequence_gets_the_same_bits_whatever_else_is_in_the_batch() -> None:
    batch = paged_batch(Layout(), [70, 20, 30], [1, 1, 1]).to(DEVICE)
    tiling = replace(SMALL, splits=2)
    together = attend(tiling, *batch.arguments, SCALING)

    alone = attend(
        tiling,
        batch.query[:1],
        batch.key_cache,
        batch.value_cache,
        batch.block_tables[:1],
        QuerySpans.of([0, 1], [70], DEVICE),
        SCALING,
    )

    assert torch.equal(alone, together[:1])


def test_a_query_in_another_format_than_the_cache_keeps_its_own() -> None:
    batch = paged_batch(Layout(dtype=torch.bfloat16), [30, 40], [1, 4]).to(DEVICE)

    got = attend(SMALL, batch.query.float(), *batch.arguments[1:], SCALING)

    assert got.dtype == torch.float32
    assert torch.equal(got.bfloat16(), attend(SMALL, *batch.arguments, SCALING))


def test_queries_may_lie_apart_in_any_way() -> None:
    batch = paged_batch(Layout(), [30, 40], [1, 4]).to(DEVICE)
    apart = batch.query.permute(2, 1, 0).contiguous().permute(2, 1, 0)

    got = attend(SMALL, apart, *batch.arguments[1:], SCALING)

    assert torch.equal(got, attend(SMALL, *batch.arguments, SCALING))


@pytest.mark.parametrize("bounds", [(1, 80), (1, 600), (30, 300)])
def test_the_bounds_of_a_recorded_launch_may_be_wide(bounds: tuple[int, int]) -> None:
    batch = paged_batch(Layout(), FIVE_TILES, [1] * 5).to(DEVICE)
    wide = replace(batch.spans, max_query_len=bounds[0], max_seq_len=bounds[1])

    got = paged_attention(*batch.arguments[:4], wide, SCALING)

    want = paged_attention(*batch.arguments, SCALING)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


def test_long_contexts_are_split_and_full_machines_are_not() -> None:
    layout = Layout(32, 8, 128, 128)

    def splits(num_sequences: int, length: int, window: int | None = None) -> int:
        batch = paged_batch(layout, [1] * num_sequences, [1] * num_sequences)
        spans = QuerySpans(batch.spans.query_start, batch.spans.seq_lens, 1, length)
        return choose_tiling(*batch.arguments[:3], spans, window).splits

    assert splits(1, 100) == 1
    assert splits(1, 32768) == 64
    assert splits(1, 32768, window=250) == 2
    assert splits(200, 32768) == 1


def test_few_binaries_serve_all_batches() -> None:
    layout = Layout(8, 2)

    def binary(num_sequences: int, num_queries: int) -> tuple[int, int, bool]:
        queries = [num_queries] * num_sequences
        batch = paged_batch(layout, queries, queries)
        tiling = choose_tiling(*batch.arguments[:3], batch.spans, None)
        return tiling.rows, tiling.keys, tiling.one_tile

    assert len({binary(n, q) for n in (1, 3, 20) for q in (1, 2, 5, 9, 33)}) == 2


def test_heads_beyond_what_a_processor_holds_are_refused() -> None:
    batch = paged_batch(Layout(2, 1, 288, 16), [3], [1]).to(DEVICE)

    with pytest.raises(ValueError, match="288 numbers of 4 bytes"):
        paged_attention(*batch.arguments, SCALING)


@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    splits=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_where_blocks_lie_changes_no_bit(lengths: list[int], splits: int, seed: int) -> None:
    batch = paged_batch(Layout(2, 1, block_size=8), lengths, [1] * len(lengths)).to(DEVICE)
    order = torch.randperm(len(batch.key_cache), generator=torch.Generator().manual_seed(seed))
    order = order.to(DEVICE)
    tiling = replace(SMALL, splits=splits)

    moved = attend(
        tiling,
        batch.query,
        batch.key_cache[order.argsort()],
        batch.value_cache[order.argsort()],
        order[batch.block_tables],
        batch.spans,
        SCALING,
    )

    assert torch.equal(moved, attend(tiling, *batch.arguments, SCALING))


@settings(max_examples=6)
@given(length=st.integers(2, 40), splits=st.integers(1, 3), window=st.sampled_from([None, 9]))
def test_a_prompt_gives_what_its_tokens_give_one_by_one(
    length: int, splits: int, window: int | None
) -> None:
    batch = paged_batch(Layout(2, 1, block_size=8), [length], [length]).to(DEVICE)
    tiling = replace(SMALL, splits=splits)
    whole = attend(tiling, *batch.arguments, SCALING, window)
    positions = [0, length // 2, length - 1]

    single = attend(
        tiling,
        batch.query[positions],
        batch.key_cache,
        batch.value_cache,
        batch.block_tables.expand(3, -1),
        QuerySpans.of([0, 1, 2, 3], [position + 1 for position in positions], DEVICE),
        SCALING,
        window,
    )

    torch.testing.assert_close(single, whole[positions], atol=2e-6, rtol=2e-6)
