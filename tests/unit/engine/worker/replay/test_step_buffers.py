"""The inputs of steps at fixed addresses: what is in them, and in their padding."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.kv import FULL_AND_SLIDING, admit, compute, kv_manager, sequence_of
from torch import Tensor

from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.scheduling.step_input import ScheduledSequence, flatten
from loraplex.engine.step import FlatStep
from loraplex.engine.worker.input_batch import InputBatch
from loraplex.engine.worker.replay.step_buffers import StepBuffers, StepSize

CPU = torch.device("cpu")
NUM_SLOTS = 3
LIMITS = StepSize(40, 8, 8)


def manager() -> KVCacheManager:
    return kv_manager(100, groups=FULL_AND_SLIDING)


def scheduled(
    kv: KVCacheManager, num_tokens: int, slot: int = -1, adapter_start: int = 0, new: int = 1
) -> ScheduledSequence:
    """A sequence whose last `new` tokens are to be computed."""
    sequence = sequence_of(list(range(10, 10 + num_tokens)), adapter_start=adapter_start)
    sequence.adapter_slot = slot
    admit(kv, sequence)
    compute(kv, sequence, num_tokens - new - sequence.num_computed_tokens)
    assert kv.allocate_slots(sequence, new)
    return ScheduledSequence(sequence, num_tokens=new, num_choices=1)


def size_of(step: FlatStep) -> StepSize:
    return StepSize(len(step.token_ids), len(step.seq_lens), len(step.logits_indices))


def tensors(batch: InputBatch, num_blocks: int) -> list[Tensor]:
    """All that a forward reads, tables up to the blocks that are in use."""
    lora = batch.hidden_lora
    return [
        batch.token_ids,
        batch.positions,
        batch.logits_indices,
        batch.attention.spans.query_start,
        batch.attention.spans.seq_lens,
        *batch.attention.slot_mapping,
        batch.attention.block_tables[:, :, :num_blocks],
        *([] if lora is None else [lora.token_slots, lora.rows]),
    ]


PARTS = st.lists(
    st.tuples(st.integers(1, 30), st.integers(-1, NUM_SLOTS - 1), st.integers(0, 30)),
    min_size=1,
    max_size=4,
)


@given(first=PARTS, then=PARTS)
@settings(max_examples=50)
def test_the_inputs_are_those_of_a_step_in_memory_of_its_own(
    first: list[tuple[int, int, int]], then: list[tuple[int, int, int]]
) -> None:
    kv = manager()
    buffers = StepBuffers(kv, StepSize(120, 4, 4), NUM_SLOTS, CPU)
    for parts in (first, then):
        steps = [scheduled(kv, n, slot, start, new=(n + 1) // 2) for n, slot, start in parts]
        step = flatten(steps, kv)

        buffers.fill(step, size_of(step))

        got = buffers.batch(size_of(step), NUM_SLOTS if step.has_adapter else None)
        want, num_blocks = InputBatch.of(step, CPU), step.block_tables.shape[2]
        pairs = zip(tensors(got, num_blocks), tensors(want, num_blocks), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        for item in steps:
            kv.free(item.sequence)


def test_an_adapter_acts_from_its_start_on() -> None:
    kv = manager()
    step = flatten([scheduled(kv, 6, slot=1, adapter_start=5, new=3)], kv)
    buffers = StepBuffers(kv, LIMITS, NUM_SLOTS, CPU)

    buffers.fill(step, size_of(step))

    batch = buffers.batch(size_of(step), NUM_SLOTS)
    assert batch.hidden_lora is not None
    assert batch.logits_lora is not None
    assert batch.hidden_lora.token_slots.tolist() == [-1, -1, 1]
    assert batch.logits_lora.token_slots.tolist() == [1]


def test_padding_has_no_tokens_and_writes_nowhere_and_has_no_adapter() -> None:
    kv = manager()
    buffers, size = StepBuffers(kv, LIMITS, NUM_SLOTS, CPU), StepSize(4, 4, 4)
    buffers.fill(flatten([scheduled(kv, 6, slot=2) for _ in range(4)], kv), size)

    buffers.fill(flatten([scheduled(kv, 9, slot=1)], kv), size)

    batch = buffers.batch(size, NUM_SLOTS)
    assert batch.attention.spans.seq_lens.tolist() == [9, 0, 0, 0]
    assert batch.attention.spans.query_start.tolist() == [0, 1, 2, 3, 4]
    assert all(slots[1:].tolist() == [-1, -1, -1] for slots in batch.attention.slot_mapping)
    assert batch.hidden_lora is not None
    assert batch.hidden_lora.token_slots.tolist() == [1, -1, -1, -1]
    assert batch.hidden_lora.starts.tolist() == [0, 1, 1, 1]


def test_a_cleared_size_is_all_padding() -> None:
    kv = manager()
    buffers, size = StepBuffers(kv, LIMITS, NUM_SLOTS, CPU), StepSize(7, 3, 2)
    buffers.fill(flatten([scheduled(kv, 7, slot=2, new=7)], kv), size)

    buffers.clear(size)

    batch = buffers.batch(size, NUM_SLOTS)
    assert batch.attention.spans.query_start.tolist() == [0, 1, 2, 7]
    assert batch.attention.spans.seq_lens.tolist() == [0, 0, 0]
    assert all(slots.tolist() == [-1] * 7 for slots in batch.attention.slot_mapping)
    assert batch.hidden_lora is not None
    assert batch.hidden_lora.token_slots.tolist() == [-1] * 7


def test_the_same_rows_lie_at_the_same_addresses() -> None:
    kv = manager()
    buffers, size = StepBuffers(kv, LIMITS, NUM_SLOTS, CPU), StepSize(2, 2, 2)
    buffers.fill(flatten([scheduled(kv, 6, slot=2), scheduled(kv, 4)], kv), size)
    before = [part.data_ptr() for part in tensors(buffers.batch(size, NUM_SLOTS), 4)]

    buffers.fill(flatten([scheduled(kv, 9), scheduled(kv, 5, slot=0)], kv), size)

    after = buffers.batch(size, NUM_SLOTS)
    assert [part.data_ptr() for part in tensors(after, 4)] == before
    assert after.token_ids.tolist() == [18, 14]
