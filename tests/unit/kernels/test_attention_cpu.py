"""Native paged attention against the naive one, over poisoned caches."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from support.kernels.paged import Layout, PagedBatch, paged_batch
from support.threads import torch_threads

from loraplex.kernels.attention import naive
from loraplex.kernels.attention.cpu import paged_attention
from loraplex.kernels.attention.spans import QuerySpans

pytestmark = pytest.mark.usefixtures("native")

DTYPES = [torch.float32, torch.bfloat16]
RAGGED = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 600]
CHUNKS = [(0, 1, 2, 3, 8, 9), (1, 5, 40, 37, 144, 145)]
LENGTH = 600


def assert_equals_naive(batch: PagedBatch, tolerance: float = 2e-5, **options: Any) -> None:
    want = naive.paged_attention(*batch.float().arguments, 0.2, **options)
    got = paged_attention(*batch.arguments, 0.2, **options)

    assert got.dtype == batch.query.dtype
    if got.dtype == torch.bfloat16:
        tolerance = max(tolerance, 1.6e-2)
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (8, 2), (5, 5), (12, 1), (20, 1)])
def test_one_query_a_sequence(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    layout = Layout(*heads, dtype=dtype)

    assert_equals_naive(paged_batch(layout, RAGGED, [1] * len(RAGGED)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (17, 33), (64, 64), (80, 80), (96, 31), (256, 256)])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_chunks_of_any_length_and_heads_of_any_width(
    dtype: torch.dtype, dims: tuple[int, int], chunks: tuple[int, ...]
) -> None:
    layout = Layout(4, 2, *dims, dtype=dtype)
    lengths = [length + 70 for length in chunks]

    assert_equals_naive(paged_batch(layout, lengths, list(chunks)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 31, 33])
def test_a_whole_prompt_in_blocks_of_any_size(
    dtype: torch.dtype, block_size: int, length: int
) -> None:
    layout = Layout(block_size=block_size, dtype=dtype)

    assert_equals_naive(paged_batch(layout, [length, 40], [length, 40]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [1, 15, 16, 17, 64, 65, 1000])
@pytest.mark.parametrize("chunk", [1, 9, 150])
def test_a_window_hides_what_lies_behind_it(dtype: torch.dtype, window: int, chunk: int) -> None:
    lengths = [chunk, chunk + 1, chunk + 90, chunk + 400]

    batch = paged_batch(Layout(dtype=dtype), lengths, [chunk] * 4, window)

    assert_equals_naive(batch, window=window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 0.5, 50.0])
@pytest.mark.parametrize("chunk", [1, 30])
def test_soft_caps_and_sinks(dtype: torch.dtype, softcap: float | None, chunk: int) -> None:
    batch = paged_batch(Layout(dtype=dtype), [30, 300], [chunk, chunk], 40)
    sinks = torch.tensor([-3.0, 0.0, 2.0, 80.0]).to(dtype)

    assert_equals_naive(batch, softcap=softcap, window=40, sinks=sinks)


@pytest.mark.parametrize("chunk", [1, 30])
def test_huge_scores_do_not_overflow(chunk: int) -> None:
    batch = paged_batch(Layout(), [300, 40], [chunk, chunk])
    batch.query.mul_(1e3)

    assert_equals_naive(batch, tolerance=1e-2)  # float32 scores of 1e4 are good to 1e-3


def test_a_query_in_another_format_than_the_cache_keeps_its_own() -> None:
    batch = paged_batch(Layout(dtype=torch.bfloat16), [30, 40], [1, 40])

    got = paged_attention(batch.query.float(), *batch.arguments[1:], 0.2)

    assert got.dtype == torch.float32
    assert torch.equal(got, paged_attention(*batch.arguments, 0.2).float())


def test_an_empty_batch_gives_nothing() -> None:
    assert paged_attention(*paged_batch(Layout(), [], []).arguments, 1.0).shape == (0, 4, 32)


def test_the_rows_of_padding_become_zeros() -> None:
    batch = paged_batch(Layout(), [50, 0, 30], [1, 0, 1])
    spans = QuerySpans.of([0, 1, 3, 4], [50, 0, 30])
    query = torch.cat([batch.query[:1], torch.full((2, 4, 32), float("nan")), batch.query[1:]])

    got = paged_attention(query, *batch.arguments[1:4], spans, 0.2)

    assert not got[1:3].any()
    assert torch.equal(got[[0, 3]], paged_attention(*batch.arguments, 0.2))


def test_a_sequence_without_queries_changes_nothing_beside_it() -> None:
    batch = paged_batch(Layout(), [50, 20, 30], [1, 0, 1])
    assert_equals_naive(batch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sequence_gets_the_same_bits_alone_and_in_company(dtype: torch.dtype) -> None:
    batch = paged_batch(Layout(dtype=dtype), [700, 20, 300], [1, 20, 1])
    together = paged_attention(*batch.arguments, 0.2)

    for s, rows in enumerate([slice(0, 1), slice(1, 21), slice(21, 22)]):
        alone = paged_attention(
            batch.query[rows],
            batch.key_cache,
            batch.value_cache,
            batch.block_tables[s : s + 1],
            QuerySpans.of([0, rows.stop - rows.start], [batch.seq_lens[s]]),
            0.2,
        )
        assert torch.equal(alone, together[rows])


def test_the_highest_blocks_of_a_cache_beyond_int32() -> None:
    block = 2 * 16 * 64  # numbers in the keys, or the values, of one block
    storage = torch.empty(2**31 // block + 8, 2 * block, dtype=torch.bfloat16)
    keys, values = (part.unflatten(1, (2, 16, 64)) for part in storage.split(block, dim=1))
    small = paged_batch(Layout(4, 2, 64, 64, dtype=torch.bfloat16), [50], [1])
    moved = torch.tensor([[len(storage) - 1 - i for i in range(4)]])
    keys[moved[0]] = small.key_cache[small.block_tables[0]]
    values[moved[0]] = small.value_cache[small.block_tables[0]]

    got = paged_attention(small.query, keys, values, moved, small.spans, 0.2)

    assert torch.equal(got, paged_attention(*small.arguments, 0.2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 900])
@pytest.mark.parametrize("chunk", [1, 2, 9, 36])
def test_long_sequences_are_cut_and_put_together_again(
    dtype: torch.dtype, window: int | None, chunk: int
) -> None:
    lengths = [chunk, 128, 129, 513, 2100]
    batch = paged_batch(Layout(dtype=dtype), lengths, [chunk] * 5, window)
    sinks = torch.tensor([-3.0, 0.0, 2.0, 80.0])

    assert_equals_naive(batch, window=window, softcap=30.0, sinks=sinks)


CUTS: dict[str, list[int]] = {
    "token by token": list(range(1, LENGTH)),
    "at a part's borders": [255, 256, 257, 512, 513],
    "few and many rows": [1, 3, 12, 300, 302, 307, 560, 598],
    "at its end": [LENGTH - 2, LENGTH - 1],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("window", [None, 299])
def test_a_row_has_the_same_bits_however_its_sequence_is_cut(
    dtype: torch.dtype, dim: int, window: int | None
) -> None:
    batch = paged_batch(Layout(4, 2, dim, dim, dtype=dtype), [LENGTH], [LENGTH])
    options: dict[str, Any] = {"window": window, "softcap": 30.0}
    options["sinks"] = torch.tensor([-3.0, 0.0, 2.0, 80.0])
    at_once = paged_attention(*batch.arguments, 0.2, **options)

    for name, cuts in CUTS.items():
        pieces = [
            paged_attention(
                batch.query[begin:end],
                *batch.arguments[1:4],
                QuerySpans.of([0, end - begin], [end]),
                0.2,
                **options,
            )
            for begin, end in pairwise([0, *cuts, LENGTH])
        ]
        assert torch.equal(torch.cat(pieces), at_once), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_on_any_number_of_threads(dtype: torch.dtype) -> None:
    batch = paged_batch(Layout(8, 1, 64, 64, dtype=dtype), [700, 300, 900], [1, 40, 300])

    answers = []
    for threads in (1, 2, 5):
        with torch_threads(threads):
            answers.append(paged_attention(*batch.arguments, 0.2))

    assert all(torch.equal(answer, answers[0]) for answer in answers)
