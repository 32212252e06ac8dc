"""What a layer's state says of blocks is what its queries see, token by token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.kv.storage.layer_state import (
    FullAttention,
    LayerState,
    SlidingWindow,
    attention_state,
)

states = st.none() | st.integers(1, 40)
block_sizes = st.integers(1, 17)


def seen_by_next(window: int | None, num_tokens: int) -> range:
    """Positions that a query behind so many tokens reads, its own apart."""
    return range(0 if window is None else max(0, num_tokens - window + 1), num_tokens)


@given(states, st.integers(0, 120), block_sizes)
def test_a_block_has_passed_where_the_next_query_sees_none_of_its_tokens(
    window: int | None, num_tokens: int, block_size: int
) -> None:
    passed = attention_state(window).num_skipped(num_tokens, block_size)

    start = seen_by_next(window, num_tokens).start
    assert passed * block_size <= start
    assert (passed + 1) * block_size > start


@given(states, st.sets(st.integers(0, 19)), st.integers(0, 20), block_sizes)
def test_the_usable_prefix_is_the_longest_whose_visible_blocks_are_there(
    window: int | None, cached: set[int], limit: int, block_size: int
) -> None:
    state = attention_state(window)

    usable = state.usable_prefix(cached.__contains__, limit, block_size)

    def is_usable(num_blocks: int) -> bool:
        seen = seen_by_next(window, num_blocks * block_size)
        return {position // block_size for position in seen} <= cached

    assert usable == max(n for n in range(limit + 1) if is_usable(n))


@pytest.mark.parametrize("state", [FullAttention(), SlidingWindow(6)])
@pytest.mark.parametrize(("num_tokens", "copies"), [(0, False), (7, True), (8, False), (9, True)])
def test_forks_part_by_a_copy_where_they_share_a_half_full_block(
    state: LayerState, num_tokens: int, copies: bool
) -> None:
    assert state.copies_on_fork(num_tokens, 8) is copies
