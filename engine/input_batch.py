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
from loraplex.kernels.lora.batch import BASE_SLOT, LoRABatch


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
    logits_indices: Tensor | None  # [R] int64 rows of T whose logits are needed; None: all
    hidden_lora: LoRABatch | None  # the T rows' adapters; None: all are the base model's
    logits_lora: LoRABatch | None  # the same of the R rows


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
    logits_indices = np.array(
        [
            query_start[i] + offset
            for i, item in enumerate(scheduled)
            for offset, _ in _logits_rows(item)
        ],
        dtype=np.int64,
    )
    slots = np.concatenate(
        [_adapter_slots(item.sequence, a, b) for item, (a, b) in zip(scheduled, spans, strict=True)]
    )
    return InputBatch(
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.from_numpy(positions).to(device),
        attention=_attention_batch(scheduled, spans, kv, query_start, positions, device),
        logits_indices=torch.from_numpy(logits_indices).to(device),
        hidden_lora=LoRABatch.build(slots, device),
        logits_lora=LoRABatch.build(slots[logits_indices], device),
    )


def logits_rows(scheduled: list[ScheduledSequence]) -> list[LogitsRow]:
    """What each row of a step's logits is for, in their order."""
    return [row for item in scheduled for _, row in _logits_rows(item)]


def adapter_slot_at(sequence: Sequence, position: int) -> int:
    """The slot of the adapter that acts on a sequence's token, `BASE_SLOT` for none."""
    return sequence.adapter_slot if position >= sequence.adapter_start else BASE_SLOT


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
