"""FlatStep: the new tokens of all of a step's sequences in one row, as arrays on the host."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.scheduling.scheduler import ScheduledSequence
from loraplex.engine.sequence import Sequence
from loraplex.kernels.lora.batch import BASE_SLOT

NOWHERE = -1  # the slot of a token whose keys and values are not written


@dataclass(frozen=True)
class LogitsRow:
    """Why one row's logits are computed."""

    sequence: Sequence
    num_samples: int  # next tokens to sample from it
    prompt_position: int = -1  # else the position of the prompt token whose logprobs are wanted


@dataclass(frozen=True, eq=False)
class FlatStep:
    """A step of S sequences, T new tokens and R rows of logits, over G groups of layers."""

    token_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    slot_mapping: NDArray[np.int64]  # [G, T] where keys and values go; NOWHERE: they are there
    adapter_slots: NDArray[np.int32]  # [T]; BASE_SLOT for the base model
    query_start: NDArray[np.int64]  # [S + 1] the first token of each sequence, and T
    seq_lens: NDArray[np.int64]  # [S] tokens, the new ones included
    block_tables: NDArray[np.int64]  # [G, S, B]
    logits_indices: NDArray[np.int64]  # [R] below T

    @classmethod
    def empty(cls, num_groups: int) -> "FlatStep":
        """Of no sequences."""
        none = np.empty(0, np.int64)
        return cls(
            token_ids=none,
            positions=none,
            slot_mapping=np.empty((num_groups, 0), np.int64),
            adapter_slots=np.empty(0, np.int32),
            query_start=np.zeros(1, np.int64),
            seq_lens=none,
            block_tables=np.empty((num_groups, 0, 0), np.int64),
            logits_indices=none,
        )

    @property
    def has_adapter(self) -> bool:
        return bool((self.adapter_slots != BASE_SLOT).any())


def flatten(scheduled: Items[ScheduledSequence], kv: KVCacheManager) -> FlatStep:
    """What of the scheduled sequences a step computes."""
    sequences = [item.sequence for item in scheduled]
    counts = np.array([item.num_tokens for item in scheduled], np.int64)
    starts = np.array([sequence.num_computed_tokens for sequence in sequences], np.int64)
    ends = starts + counts
    query_start = np.concatenate((np.zeros(1, np.int64), counts.cumsum()))
    rows = np.repeat(np.arange(len(sequences)), counts)  # [T] each token's sequence
    positions = np.arange(query_start[-1]) + (starts - query_start[:-1])[rows]
    num_blocks = -(-int(ends.max()) // kv.block_size)
    ids = np.stack([kv.block_ids(s)[:, :num_blocks] for s in sequences], axis=1)
    tables = ids.astype(np.int64)
    blocks, offsets = np.divmod(positions, kv.block_size)
    slots = tables[:, rows, blocks] * kv.block_size + offsets
    written_from = np.stack([kv.written_from(s) for s in sequences], axis=1)[:, rows]
    return FlatStep(
        token_ids=_token_ids(scheduled),
        positions=positions,
        slot_mapping=np.where(positions >= written_from, slots, NOWHERE),
        adapter_slots=_adapter_slots(sequences, rows, positions),
        query_start=query_start,
        seq_lens=ends,
        block_tables=tables,
        logits_indices=_logits_indices(scheduled, query_start.tolist()),
    )


def logits_rows(scheduled: Items[ScheduledSequence]) -> list[LogitsRow]:
    """What each row of a step's logits is for, in their order."""
    return [row for item in scheduled for _, row in _logits_rows(item)]


def _token_ids(scheduled: Items[ScheduledSequence]) -> NDArray[np.int64]:
    token_ids: list[int] = []
    for item in scheduled:
        start = item.sequence.num_computed_tokens
        token_ids += item.sequence.token_ids[start : start + item.num_tokens]
    return np.array(token_ids, np.int64)


def _adapter_slots(
    sequences: list[Sequence], rows: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Each sequence's slot from the position on at which its adapter begins to act."""
    slots = np.array([sequence.adapter_slot for sequence in sequences], np.int32)
    acts_from = np.array([sequence.adapter_start for sequence in sequences], np.int64)
    return np.where(positions >= acts_from[rows], slots[rows], np.int32(BASE_SLOT))


def _logits_indices(
    scheduled: Items[ScheduledSequence], query_start: list[int]
) -> NDArray[np.int64]:
    indices = [
        start + offset
        for start, item in zip(query_start, scheduled, strict=False)
        for offset, _ in _logits_rows(item)
    ]
    return np.array(indices, np.int64)


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
