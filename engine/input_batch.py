"""InputBatch: this step's tensors, gathered from the sequences' rows."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.engine.attention import AttentionBatch
from loraplex.engine.kv_cache_manager import KVCacheManager
from loraplex.engine.scheduler import ScheduledSequence
from loraplex.engine.sequence import Sequence
from loraplex.kernels.attention.spans import QuerySpans


@dataclass(frozen=True)
class LogitsRow:
    """Why one row's logits are computed."""

    sequence: Sequence
    num_samples: int  # next tokens to sample from it
    prompt_position: int = -1  # else the position of the prompt token whose logprobs are wanted


@dataclass(frozen=True)
class InputBatch:
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    attention: AttentionBatch
    logits_indices: NDArray[np.int64]  # [R] rows of T whose logits are needed
    logits_rows: list[LogitsRow]  # R
    adapter_slots: NDArray[np.int32]  # [T]; -1 where the base model answers alone


def build_input_batch(
    scheduled: list[ScheduledSequence], kv: KVCacheManager, device: torch.device
) -> InputBatch:
    """Flattens the scheduled sequences' new tokens into one row of T tokens."""
    spans = [
        (item.sequence.num_computed_tokens, item.sequence.num_computed_tokens + item.num_tokens)
        for item in scheduled
    ]
    token_ids = [
        t
        for item, (a, b) in zip(scheduled, spans, strict=True)
        for t in item.sequence.token_ids[a:b]
    ]
    positions = np.concatenate([np.arange(start, end) for start, end in spans])
    query_start = np.cumsum([0, *(end - start for start, end in spans)]).tolist()
    logits = [
        (query_start[i] + offset, row)
        for i, item in enumerate(scheduled)
        for offset, row in _logits_rows(item)
    ]
    return InputBatch(
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.from_numpy(positions).to(device),
        attention=_attention_batch(scheduled, spans, kv, query_start, positions, device),
        logits_indices=np.array([index for index, _ in logits], dtype=np.int64),
        logits_rows=[row for _, row in logits],
        adapter_slots=np.concatenate(
            [
                _adapter_slots(item.sequence, a, b)
                for item, (a, b) in zip(scheduled, spans, strict=True)
            ]
        ),
    )


def _attention_batch(
    scheduled: list[ScheduledSequence],
    spans: list[tuple[int, int]],
    kv: KVCacheManager,
    query_start: list[int],
    positions: NDArray[np.int64],
    device: torch.device,
) -> AttentionBatch:
    seq_lens = [end for _, end in spans]
    num_blocks = -(-max(seq_lens) // kv.block_size)
    tables = np.stack(
        [kv.block_ids(item.sequence)[:, :num_blocks] for item in scheduled], axis=1
    ).astype(np.int64)  # [G, S, B]
    rows = np.repeat(np.arange(len(scheduled)), np.diff(query_start))
    blocks, offsets = positions // kv.block_size, positions % kv.block_size
    slots = tables[:, rows, blocks] * kv.block_size + offsets  # [G, T]
    return AttentionBatch(
        spans=QuerySpans.of(query_start, seq_lens, device),
        slot_mapping=list(torch.from_numpy(slots).to(device)),
        block_tables=torch.from_numpy(tables).to(device),
    )


def _logits_rows(item: ScheduledSequence) -> list[tuple[int, LogitsRow]]:
    """(offset among the sequence's new tokens, row) of each position whose logits are needed."""
    sequence = item.sequence
    rows = []
    if sequence.owes_prompt_logprobs:
        start = sequence.num_computed_tokens
        end = min(start + item.num_tokens, sequence.num_prompt_tokens - 1)
        rows = [(p - start, LogitsRow(sequence, 0, p + 1)) for p in range(start, end)]
    if item.num_samples:
        rows.append((item.num_tokens - 1, LogitsRow(sequence, item.num_samples)))
    return rows


def _adapter_slots(sequence: Sequence, start: int, end: int) -> NDArray[np.int32]:
    """The sequence's slot from the position on at which its adapter begins to act, else -1."""
    slots = np.full(end - start, sequence.adapter_slot, np.int32)
    slots[: max(0, min(end, sequence.adapter_start) - start)] = -1
    return slots
