"""LoRABatch: the rows of each slot."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.kernels.lora.batch import BASE_SLOT, LoRABatch

CPU = torch.device("cpu")


@pytest.mark.parametrize("slots", [[], [BASE_SLOT], [BASE_SLOT] * 5])
def test_a_batch_without_adapters_is_none(slots: list[int]) -> None:
    assert LoRABatch.build(slots, CPU) is None


@given(st.lists(st.integers(-1, 4), min_size=1, max_size=40), st.integers(0, 3))
def test_segments_name_each_row_of_an_adapter_once(slots: list[int], room: int) -> None:
    used = len({slot for slot in slots if slot != BASE_SLOT})
    batch = LoRABatch.build(slots, CPU, capacity=used + room)

    named = {}
    if batch is not None:
        for i, slot in enumerate(batch.slots.tolist()):
            rows = batch.rows[batch.starts[i] : batch.starts[i + 1]].tolist()
            assert rows == sorted(rows)
            named |= dict.fromkeys(rows, slot)

    assert named == {row: slot for row, slot in enumerate(slots) if slot != BASE_SLOT}


def test_what_is_not_in_use_is_minus_one_and_empty() -> None:
    batch = LoRABatch.build([2, -1, 0], CPU, capacity=4)
    assert batch is not None
    assert batch.rows.tolist() == [2, 0, -1]
    assert batch.slots.tolist() == [0, 2, -1, -1]
    assert batch.starts.tolist() == [0, 1, 2, 2, 2]


def test_token_slots_are_kept_as_given() -> None:
    batch = LoRABatch.build([2, -1, 0], CPU)
    assert batch is not None
    assert batch.token_slots.tolist() == [2, -1, 0]
    assert batch.token_slots.dtype == torch.int32
