"""LoRABatch: the rows of each slot."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.batch import BASE_SLOT, LoRABatch

CPU = torch.device("cpu")


@pytest.mark.parametrize("slots", [[], [BASE_SLOT], [BASE_SLOT] * 5])
def test_a_batch_without_adapters_is_none(slots: list[int]) -> None:
    assert LoRABatch.build(slots, CPU) is None


@given(st.lists(st.integers(-1, 4), min_size=1, max_size=40))
def test_segments_name_each_row_of_an_adapter_once(slots: list[int]) -> None:
    batch = LoRABatch.build(slots, CPU)
    named = {
        int(row): segment.slot
        for segment in (batch.segments if batch else ())
        for row in segment.rows
    }
    assert named == {row: slot for row, slot in enumerate(slots) if slot != BASE_SLOT}


def test_token_slots_are_kept_as_given() -> None:
    batch = LoRABatch.build([2, -1, 0], CPU)
    assert batch is not None
    assert batch.token_slots.tolist() == [2, -1, 0]
    assert batch.token_slots.dtype == torch.int32


def test_a_choice_of_rows_keeps_its_order() -> None:
    batch = LoRABatch.build([2, -1, 0, 2], CPU)
    assert batch is not None
    chosen = batch.select(np.array([3, 1, 2]))
    assert chosen is not None
    assert chosen.token_slots.tolist() == [2, -1, 0]


def test_a_choice_of_base_rows_only_is_none() -> None:
    batch = LoRABatch.build([2, -1, 0], CPU)
    assert batch is not None
    assert batch.select([1]) is None
    assert batch.select([]) is None
