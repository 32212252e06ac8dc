"""Layers fall into groups of one size, and a sequence's peak is bounded before it runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.kv.storage.groups import (
    MAX_PADDING,
    KVGroup,
    KVLayer,
    blocks_at_peak,
    choose_group_size,
    group_layers,
    group_size,
)
from loraplex.engine.kv.storage.layer_state import FullAttention, SlidingWindow, attention_state


def layers(windows: list[int | None]) -> list[KVLayer]:
    """One layer for each window."""
    return [KVLayer(i, 2, 8, 8, attention_state(window)) for i, window in enumerate(windows)]


def gemma_3(num_layers: int) -> list[KVLayer]:
    """Five sliding layers, then a full one."""
    return layers([None if (i + 1) % 6 == 0 else 512 for i in range(num_layers)])


@pytest.mark.parametrize(
    ("pattern", "sizes_by_window"),
    [
        (gemma_3(18), [(None, 3), *[(512, 3)] * 5]),
        (gemma_3(26), [(None, 4), *[(512, 4)] * 5, (512, 2)]),
        (layers([4096, None] * 13), [(None, 13), (4096, 13)]),
        (layers([4096] * 32), [(4096, 32)]),
        (layers([None] * 16), [(None, 16)]),
        (layers([128, None, 128, None, 128]), [(None, 1), (None, 1), *[(128, 1)] * 3]),
        (layers([None, *[256] * 11]), [(None, 1), *[(256, 1)] * 11]),
        (layers([64, 256, None]), [(None, 1), (64, 1), (256, 1)]),
        (layers([7]), [(7, 1)]),
    ],
    ids=[
        "gemma-3-270m",
        "gemma-3-1b",
        "gemma-2",
        "all-sliding",
        "all-full",
        "odd",
        "one-full",
        "two-windows",
        "one-layer",
    ],
)
def test_layers_group_by_window_full_attention_first(
    pattern: list[KVLayer], sizes_by_window: list[tuple[int | None, int]]
) -> None:
    groups = group_layers(pattern)

    assert [(group.state.window, len(group.layers)) for group in groups] == sizes_by_window


@pytest.mark.parametrize(
    ("pattern", "frontiers", "size"),
    [
        (gemma_3(18), [], 3),
        (gemma_3(18), [0, 18, 2**31], 3),
        (gemma_3(18), [1], 3),
        (gemma_3(18), [12], 2),
        (layers([None] * 28), [14], 14),
        (layers([None] * 28), [20], 10),
        (layers([None] * 28), [1, 0, 0], 28),
    ],
    ids=["none", "nothing-partial", "little", "sliding", "half", "two-thirds", "few"],
)
def test_groups_are_smaller_only_where_adapters_share_more_layers(
    pattern: list[KVLayer], frontiers: list[int], size: int
) -> None:
    assert choose_group_size(pattern, frontiers) == size


windows = st.lists(st.sampled_from([None, 16, 512]), min_size=1, max_size=40)


@given(windows)
def test_every_layer_is_in_exactly_one_group_of_its_window(pattern: list[int | None]) -> None:
    groups = group_layers(layers(pattern))

    placed = sorted((layer, group.state.window) for group in groups for layer in group.layers)
    assert [layer for layer, _ in placed] == list(range(len(pattern)))
    assert [window for _, window in placed] == pattern


@given(windows)
def test_equal_sizes_leave_little_memory_unused(pattern: list[int | None]) -> None:
    groups = group_layers(layers(pattern))

    places = len(groups) * group_size(groups)
    assert 1 - len(pattern) / places <= MAX_PADDING


def held_by_window(window: int, block_size: int, num_tokens: int, chunk: int) -> int:
    """The most blocks that any step of a sliding layer touches, step by step."""
    most = 0
    for first in range(0, num_tokens, chunk):
        end = min(first + chunk, num_tokens)
        oldest = max(0, first - window + 1)
        most = max(most, -(-end // block_size) - oldest // block_size)
    return most


sizes = st.integers(1, 40)


@given(sizes, st.integers(1, 17), st.integers(1, 120), st.integers(1, 60), st.integers(1, 60))
def test_no_sequence_holds_more_than_its_peak(
    window: int, block_size: int, num_tokens: int, chunk: int, smaller: int
) -> None:
    groups = [KVGroup((0,), FullAttention()), KVGroup((1,), SlidingWindow(window))]
    peak = blocks_at_peak(groups, block_size, num_tokens, chunk)

    full = -(-num_tokens // block_size)
    for actual in {chunk, min(chunk, smaller), 1}:
        assert full + held_by_window(window, block_size, num_tokens, actual) <= peak


@given(sizes, st.integers(1, 17), st.integers(1, 30))
def test_the_peak_of_a_long_sequence_is_reached_somewhere(
    window: int, block_size: int, chunk: int
) -> None:
    peak = blocks_at_peak([KVGroup((0,), SlidingWindow(window))], block_size, 10_000, chunk)

    spans = [
        (first + chunk - 1) // block_size - (first - window + 1) // block_size + 1
        for first in range(window, window + block_size)
    ]
    assert max(spans) == peak


def test_full_attention_holds_every_token() -> None:
    assert blocks_at_peak([KVGroup((0,), FullAttention())], 16, 33, chunk=8) == 3


def test_a_short_sequence_never_fills_its_window() -> None:
    assert blocks_at_peak([KVGroup((0,), SlidingWindow(512))], 16, 33, chunk=1024) == 3
