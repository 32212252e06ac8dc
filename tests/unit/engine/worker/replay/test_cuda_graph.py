"""The sizes that decode steps are padded to where they are recorded as CUDA graphs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.worker.replay.cuda_graphs import ladder


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (32, [1, 2, 4, 8, 16, 24, 32]),
    ],
)
def test_the_ladder_ends_with_the_largest_batch(max_rows: int, sizes: list[int]) -> None:
    assert ladder(max_rows) == sizes


@given(st.integers(1, 300))
def test_the_ladder_rises_by_few_rows_at_a_time(max_rows: int) -> None:
    sizes = ladder(max_rows)

    gaps = [b - a for a, b in zip([0, *sizes], sizes, strict=False)]
    assert 0 < min(gaps) <= max(gaps) <= 8
