"""StepBuffers: the inputs of steps, at fixed addresses and refreshed in place."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.step import BASE_SLOT, NOWHERE, FlatStep
from loraplex.engine.worker.attention import AttentionBatch
from loraplex.engine.worker.input_batch import InputBatch
from loraplex.engine.worker.replay.uploads import Uploads
from loraplex.kernels.attention.spans import QuerySpans
from loraplex.kernels.lora.batch import LoRABatch


class StepSize(NamedTuple):
    num_tokens: int  # T
    num_sequences: int  # S
    num_rows: int  # R, of logits

    def holds(self, other: "StepSize") -> bool:
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))

    def grown(self, other: "StepSize") -> "StepSize":
        """Returns the smallest size that holds both."""
        return StepSize(*map(max, self, other))


class StepBuffers:
    """The inputs of one step after another, always in the same memory.

    A forward pass over them can therefore be recorded once and replayed. Tokens, sequences and rows
    beyond a step's own are padding: they write nowhere and belong to the base model.
    """

    def __init__(
        self, kv: KVCacheManager, limits: StepSize, num_slots: int, device: torch.device
    ) -> None:
        """`num_slots`: adapter slots."""
        self.limits = limits
        num_groups, max_sequences = len(kv.groups), limits.num_sequences
        wide = max(max_sequences, limits.num_rows) + 1
        self._max_seq_len = kv.max_blocks * kv.block_size
        self._uploads = uploads = None if device.type == "cpu" else Uploads(device)
        self._tokens = _Mirror((2 + num_groups, limits.num_tokens), torch.int64, device, uploads)
        self._sequences = _Mirror((3, wide), torch.int64, device, uploads)
        self._tables = _Mirror(
            (num_groups, max_sequences, kv.max_blocks), torch.int64, device, uploads
        )
        self._hidden_lora = _LoRABuffers(limits.num_tokens, num_slots, device, uploads)
        self._logits_lora = _LoRABuffers(limits.num_rows, num_slots, device, uploads)
        self._nothing = FlatStep.empty(num_groups)

    def batch(self, size: StepSize, lora_capacity: int | None) -> InputBatch:
        """Returns the input of such a size; it reads what `fill` wrote last.

        Args:
            size: within the limits.
            lora_capacity: how many adapters a step may use, at most `num_slots`; None: none, so
                that nothing is done for LoRA.
        """
        num_tokens, num_sequences, num_rows = size
        token_ids, positions, *slot_mapping = self._tokens.device[:, :num_tokens]
        query_start, seq_lens, logits_indices = self._sequences.device
        hidden = logits = None
        if lora_capacity is not None:
            hidden = self._hidden_lora.batch(num_tokens, lora_capacity)
            logits = self._logits_lora.batch(num_rows, lora_capacity)
        spans = QuerySpans(
            query_start[: num_sequences + 1],
            seq_lens[:num_sequences],
            num_tokens - num_sequences + 1,
            self._max_seq_len,
        )
        tables = self._tables.device[:, :num_sequences]
        return InputBatch(
            token_ids=token_ids,
            positions=positions,
            attention=AttentionBatch(spans, slot_mapping, tables),
            logits_indices=logits_indices[:num_rows],
            hidden_lora=hidden,
            logits_lora=logits,
        )

    def fill(self, step: FlatStep, size: StepSize) -> None:
        """Writes a step's inputs, and padding up to the size."""
        self._fill(step, size)
        if self._uploads is not None:
            self._uploads.send()

    def clear(self, size: StepSize) -> None:
        """Fills the whole size with padding."""
        self._fill(self._nothing, size)
        self._hidden_lora.fill(self._nothing.adapter_slots, size.num_tokens)
        self._logits_lora.fill(self._nothing.adapter_slots, size.num_rows)
        if self._uploads is not None:
            self._uploads.send()

    def _fill(self, step: FlatStep, size: StepSize) -> None:
        self._fill_tokens(step, size.num_tokens)
        self._fill_sequences(step, size)
        _, count, num_blocks = step.block_tables.shape
        self._tables.host[:, :count, :num_blocks] = step.block_tables
        self._tables.upload(np.s_[:, :count, :num_blocks])
        if step.has_adapter:
            self._hidden_lora.fill(step.adapter_slots, size.num_tokens)
            self._logits_lora.fill(step.adapter_slots[step.logits_indices], size.num_rows)

    def _fill_tokens(self, step: FlatStep, num_tokens: int) -> None:
        host, used = self._tokens.host, len(step.token_ids)
        host[0, :used], host[1, :used] = step.token_ids, step.positions
        host[2:, :used] = step.slot_mapping
        host[:2, used:num_tokens], host[2:, used:num_tokens] = 0, NOWHERE
        self._tokens.upload(np.s_[:, :num_tokens])

    def _fill_sequences(self, step: FlatStep, size: StepSize) -> None:
        """Gives each padding sequence one token, and the last one all remaining tokens."""
        query_start, seq_lens, logits_indices = self._sequences.host
        num_tokens, num_sequences, num_rows = size
        last = num_tokens - 1
        used = len(step.seq_lens)
        query_start[: used + 1], seq_lens[:used] = step.query_start, step.seq_lens
        padding = np.arange(1, num_sequences - used + 1) + query_start[used]
        query_start[used + 1 : num_sequences + 1] = padding.clip(max=num_tokens)
        query_start[num_sequences] = num_tokens
        seq_lens[used:num_sequences] = 0
        used = len(step.logits_indices)
        logits_indices[:used] = step.logits_indices
        logits_indices[used:num_rows] = np.arange(used, num_rows).clip(max=last)
        self._sequences.upload(np.s_[:, : max(num_sequences + 1, num_rows)])


class _LoRABuffers:
    """A `LoRABatch` of up to so many rows and slots, at fixed addresses."""

    def __init__(
        self, max_rows: int, num_slots: int, device: torch.device, uploads: Uploads | None
    ) -> None:
        self._num_slots = num_slots
        self._token_slots = _Mirror((max_rows,), torch.int32, device, uploads)
        self._rows = _Mirror((max_rows,), torch.int64, device, uploads)
        self._segments = _Mirror((2 * num_slots + 1,), torch.int64, device, uploads)
        self._filled: NDArray[np.int32] = np.empty(0, np.int32)  # with these slots, padding too

    def batch(self, num_rows: int, capacity: int) -> LoRABatch:
        segments, most = self._segments.device, self._num_slots
        return LoRABatch(
            self._token_slots.device[:num_rows],
            self._rows.device[:num_rows],
            segments[:capacity],
            segments[most : most + capacity + 1],
        )

    def fill(self, slots: NDArray[np.int32], num_rows: int) -> None:
        """Writes the rows' slots, and base rows up to so many."""
        padded = np.full(num_rows, BASE_SLOT, np.int32)
        padded[: len(slots)] = slots
        if np.array_equal(padded, self._filled):
            return
        batch = LoRABatch.grouped(padded, capacity=self._num_slots)
        self._token_slots.host[:num_rows] = padded
        self._rows.host[:num_rows] = batch.rows
        self._segments.host[: self._num_slots] = batch.slots
        self._segments.host[self._num_slots :] = batch.starts
        self._token_slots.upload(np.s_[:num_rows])
        self._rows.upload(np.s_[:num_rows])
        self._segments.upload(np.s_[:])
        self._filled = padded


class _Mirror:
    """An array on the host and the device tensor that it is copied to."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        uploads: Uploads | None,
    ) -> None:
        """`uploads`: how it is copied; None: the device's memory is the host's."""
        host = torch.zeros(shape, dtype=dtype)
        self.host = host.numpy()
        self.device: Tensor = host if uploads is None else torch.zeros_like(host, device=device)
        self._uploads = uploads
        if uploads is not None:
            uploads.reserve(host.nbytes)

    def upload(self, part: Any) -> None:
        """Copies a part, given as an index, when the step's uploads are sent."""
        if self._uploads is not None:
            self._uploads.add(self.host[part], self.device[part])
