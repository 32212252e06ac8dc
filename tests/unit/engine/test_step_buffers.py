"""The inputs of decode steps at fixed addresses: what is in them, and in their padding."""

import torch
from support.kv import FULL_AND_SLIDING, admit, compute, kv_manager, sequence_of
from torch import Tensor

from loraplex.engine.input_batch import InputBatch, build_input_batch
from loraplex.engine.kv_cache_manager import KVCacheManager
from loraplex.engine.scheduler import ScheduledSequence
from loraplex.engine.step_buffers import StepBuffers

CPU = torch.device("cpu")
NUM_SLOTS = 3


def manager() -> KVCacheManager:
    return kv_manager(100, groups=FULL_AND_SLIDING)


def decoding(
    kv: KVCacheManager, num_tokens: int, slot: int = -1, adapter_start: int = 0
) -> ScheduledSequence:
    """A sequence of which all but the last token are computed."""
    sequence = sequence_of(list(range(10, 10 + num_tokens)), adapter_start=adapter_start)
    sequence.adapter_slot = slot
    admit(kv, sequence)
    compute(kv, sequence, num_tokens - 1 - sequence.num_computed_tokens)
    assert kv.allocate_slots(sequence, 1)
    return ScheduledSequence(sequence, num_tokens=1, num_samples=1)


def tensors(batch: InputBatch, num_blocks: int) -> list[Tensor]:
    """All that a forward reads, tables up to the blocks that are in use."""
    lora = batch.hidden_lora
    return [
        batch.token_ids,
        batch.positions,
        batch.attention.spans.query_start,
        batch.attention.spans.seq_lens,
        *batch.attention.slot_mapping,
        batch.attention.block_tables[:, :, :num_blocks],
        *([] if lora is None else [lora.token_slots, lora.rows]),
    ]


def test_the_inputs_are_those_of_a_step_that_runs_as_it_comes() -> None:
    kv = manager()
    steps = [decoding(kv, 6, slot=2), decoding(kv, 17), decoding(kv, 2, slot=0), decoding(kv, 12)]
    buffers = StepBuffers(kv, 8, NUM_SLOTS, CPU)

    with_lora = buffers.fill(steps, 4)

    want = build_input_batch(steps, kv, CPU)
    got = buffers.batch(4, with_lora=with_lora)
    assert with_lora
    num_blocks = want.attention.block_tables.shape[2]
    pairs = zip(tensors(got, num_blocks), tensors(want, num_blocks), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_an_adapter_acts_from_its_start_on() -> None:
    kv = manager()
    steps = [decoding(kv, 6, slot=1, adapter_start=5), decoding(kv, 6, slot=1, adapter_start=6)]
    buffers = StepBuffers(kv, 8, NUM_SLOTS, CPU)

    buffers.fill(steps, 2)

    lora = buffers.batch(2, with_lora=True).hidden_lora
    assert lora is not None
    assert lora.token_slots.tolist() == [1, -1]


def test_rows_of_the_base_model_need_no_lora() -> None:
    kv = manager()

    assert not StepBuffers(kv, 8, NUM_SLOTS, CPU).fill([decoding(kv, 6)], 1)


def test_padding_has_no_tokens_and_writes_nowhere_and_has_no_adapter() -> None:
    kv = manager()
    buffers = StepBuffers(kv, 8, NUM_SLOTS, CPU)
    buffers.fill([decoding(kv, 6, slot=2) for _ in range(4)], 4)

    buffers.fill([decoding(kv, 9, slot=1)], 4)

    batch = buffers.batch(4, with_lora=True)
    assert batch.attention.spans.seq_lens.tolist() == [9, 0, 0, 0]
    assert all(slots[1:].tolist() == [-1, -1, -1] for slots in batch.attention.slot_mapping)
    assert batch.hidden_lora is not None
    assert batch.hidden_lora.token_slots.tolist() == [1, -1, -1, -1]
    assert batch.hidden_lora.starts.tolist() == [0, 1, 1, 1]


def test_the_same_rows_lie_at_the_same_addresses() -> None:
    kv = manager()
    buffers = StepBuffers(kv, 8, NUM_SLOTS, CPU)
    buffers.fill([decoding(kv, 6, slot=2), decoding(kv, 4)], 2)
    before = [part.data_ptr() for part in tensors(buffers.batch(2, with_lora=True), 4)]

    buffers.fill([decoding(kv, 9), decoding(kv, 5, slot=0)], 2)

    after = buffers.batch(2, with_lora=True)
    assert [part.data_ptr() for part in tensors(after, 4)] == before
    assert after.token_ids.tolist() == [18, 14]
