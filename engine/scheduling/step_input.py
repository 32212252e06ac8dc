"""Builds the arrays and rows of a step from the scheduled sequences."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.scheduling.stop_checker import StopChecker
from loraplex.engine.scheduling.token_masks import token_masks
from loraplex.engine.sequence import Sequence
from loraplex.engine.step import (
    BASE_SLOT,
    NOWHERE,
    FlatStep,
    LogitsRows,
    PromptRow,
    RowSampling,
)


@dataclass(frozen=True)
class ScheduledSequence:
    sequence: Sequence
    num_tokens: int  # of its own to compute in this step
    num_choices: int  # to sample: 0 while its end is not reached; n on a fork
    drafts: tuple[int, ...] = ()  # guesses of what follows, computed behind its own tokens

    @property
    def num_computed(self) -> int:
        """Returns how many of the sequence's tokens the step computes, drafts included."""
        return self.num_tokens + len(self.drafts)


def flatten(scheduled: Items[ScheduledSequence], kv: KVCacheManager) -> FlatStep:
    """Flattens the tokens that a step computes into one row."""
    if not scheduled:
        return FlatStep.empty(len(kv.groups))
    sequences = [item.sequence for item in scheduled]
    counts = np.array([item.num_computed for item in scheduled], np.int64)
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
    first_writable = np.stack([kv.first_writable(s) for s in sequences], axis=1)[:, rows]
    return FlatStep(
        token_ids=_token_ids(scheduled),
        positions=positions,
        slot_mapping=np.where(positions >= first_writable, slots, NOWHERE),
        adapter_slots=_adapter_slots(sequences, rows, positions),
        query_start=query_start,
        seq_lens=ends,
        block_tables=tables,
        logits_indices=_logits_indices(scheduled, query_start.tolist()),
    )


def logits_rows(scheduled: Items[ScheduledSequence], stops: StopChecker) -> tuple[LogitsRows, ...]:
    """Describes the rows of a step's logits, in order."""
    return tuple(row for item in scheduled for row in _rows_of(item, stops))


def _rows_of(item: ScheduledSequence, stops: StopChecker) -> Iterator[LogitsRows]:
    sequence = item.sequence
    for position in _prompt_positions(item):
        num_top = sequence.sampling.prompt_logprobs or 0
        yield PromptRow(sequence.seq_id, position, sequence.token_ids[position], num_top)
    if item.num_choices:
        params = sequence.sampling
        early = sequence.num_output_tokens < params.min_tokens
        yield RowSampling(
            seq_id=sequence.seq_id,
            params=params,
            seed=sequence.seed,
            position=sequence.num_output_tokens,
            first_choice=sequence.index,
            num_choices=item.num_choices,
            prompt_token_ids=tuple(sequence.prompt_token_ids) if params.has_penalties else (),
            output_token_ids=tuple(sequence.output_token_ids) if params.has_penalties else (),
            ending_token_ids=stops.ending_token_ids(sequence) if early else frozenset(),
            drafts=item.drafts,
            masks=token_masks(params, sequence.output_token_ids, item.drafts, stops.vocab_size)
            if params.restricts_tokens
            else None,
        )


def _prompt_positions(item: ScheduledSequence) -> range:
    """Returns the prompt tokens whose log-probabilities this step's rows give, each from the row
    before it."""
    sequence = item.sequence
    if not sequence.owes_prompt_logprobs:
        return range(0)
    start = sequence.num_computed_tokens
    end = min(start + item.num_tokens, sequence.num_prompt_tokens - 1)
    return range(start + 1, end + 1)


def _token_ids(scheduled: Items[ScheduledSequence]) -> NDArray[np.int64]:
    token_ids: list[int] = []
    for item in scheduled:
        start = item.sequence.num_computed_tokens
        token_ids += item.sequence.token_ids[start : start + item.num_tokens]
        token_ids += item.drafts
    return np.array(token_ids, np.int64)


def _adapter_slots(
    sequences: list[Sequence], rows: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Returns each sequence's slot, from the position at which its adapter begins to act."""
    slots = np.array([sequence.adapter_slot for sequence in sequences], np.int32)
    acts_from = np.array([sequence.adapter_start for sequence in sequences], np.int64)
    return np.where(positions >= acts_from[rows], slots[rows], np.int32(BASE_SLOT))


def _logits_indices(
    scheduled: Items[ScheduledSequence], query_start: list[int]
) -> NDArray[np.int64]:
    indices: list[int] = []
    for first, item in zip(query_start, scheduled, strict=False):
        start = item.sequence.num_computed_tokens
        indices += [first + position - 1 - start for position in _prompt_positions(item)]
        if item.num_choices:
            last = first + item.num_tokens - 1
            indices += range(last, last + 1 + len(item.drafts))
    return np.array(indices, np.int64)
