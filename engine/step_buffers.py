"""StepBuffers: the inputs of decode steps, at fixed addresses and refreshed in place."""

from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from loraplex.engine.attention import AttentionBatch
from loraplex.engine.input_batch import InputBatch, adapter_slot_at
from loraplex.engine.kv_cache_manager import KVCacheManager
from loraplex.engine.scheduler import ScheduledSequence
from loraplex.kernels.attention.spans import QuerySpans
from loraplex.kernels.lora.batch import BASE_SLOT, LoRABatch


class StepBuffers:
    """Inputs of a step in which each of up to S sequences has one new token and wants its logits.

    The batch of so many rows is always on the same memory, so a forward pass over it can be
    recorded once and replayed. Rows beyond the sequences are padding: they have no tokens, write
    nowhere and belong to the base model.
    """

    def __init__(
        self, kv: KVCacheManager, max_rows: int, num_slots: int, device: torch.device
    ) -> None:
        """`num_slots`: of adapters."""
        self._kv = kv
        self._num_slots = num_slots
        self._max_seq_len = kv.max_blocks * kv.block_size
        self._device = device
        num_groups, lora = len(kv.groups), min(max_rows, num_slots)
        self._numbers = _Mirror((4 + num_groups, max_rows), torch.int64, device)
        self._tables = _Mirror((num_groups, max_rows, kv.max_blocks), torch.int64, device)
        self._lora = _Mirror((2 * lora + 1,), torch.int64, device)
        self._token_slots = _Mirror((max_rows,), torch.int32, device)
        self._query_start = torch.arange(max_rows + 1, device=device)
        self._numbers.host[4:] = -1  # until the first `fill` all rows are padding
        self._lora.host[:lora] = -1
        self._token_slots.host[:] = -1
        for mirror in (self._numbers, self._lora, self._token_slots):
            mirror.upload(np.s_[:])
        self._adapters: list[int] = []  # the slots that the LoRA part is filled with, padding too

    def batch(self, num_rows: int, *, with_lora: bool) -> InputBatch:
        """The input of so many rows; what it reads is what `fill` wrote last."""
        token_ids, positions, seq_lens, lora_rows, *slot_mapping = self._numbers.device
        lora = None
        if with_lora:
            capacity, most = min(num_rows, self._num_slots), len(self._lora.host) // 2
            lora = LoRABatch(
                self._token_slots.device[:num_rows],
                lora_rows[:num_rows],
                self._lora.device[:capacity],
                self._lora.device[most : most + capacity + 1],
            )
        spans = QuerySpans(
            self._query_start[: num_rows + 1], seq_lens[:num_rows], 1, self._max_seq_len
        )
        return InputBatch(
            token_ids=token_ids[:num_rows],
            positions=positions[:num_rows],
            attention=AttentionBatch(
                spans,
                [slots[:num_rows] for slots in slot_mapping],
                self._tables.device[:, :num_rows],
            ),
            logits_indices=None,
            hidden_lora=lora,
            logits_lora=lora,
        )

    def fill(self, scheduled: Rows[ScheduledSequence], num_rows: int) -> bool:
        """Writes the sequences' inputs, and padding up to `num_rows`.

        Returns:
            Whether any row has an adapter.
        """
        sequences = [item.sequence for item in scheduled]
        count, size = len(sequences), self._kv.block_size
        numbers, tables = self._numbers.host, self._tables.host
        positions = np.array([sequence.num_computed_tokens for sequence in sequences])
        blocks = positions // size
        for row, sequence in enumerate(sequences):
            used = blocks[row] + 1
            tables[:, row, :used] = self._kv.block_ids(sequence)[:, :used]
        numbers[0, :count] = [sequence.token_ids[-1] for sequence in sequences]
        numbers[1, :count] = positions
        numbers[2, :count] = positions + 1
        numbers[4:, :count] = tables[:, np.arange(count), blocks] * size + positions % size
        numbers[:3, count:num_rows] = 0
        numbers[4:, count:num_rows] = -1
        self._tables.upload(np.s_[:, :count, : int(blocks.max()) + 1])
        adapters = [adapter_slot_at(s, s.num_computed_tokens) for s in sequences]
        with_lora = any(slot != BASE_SLOT for slot in adapters)
        if with_lora:
            self._fill_lora([*adapters, *[BASE_SLOT] * (num_rows - count)])
        self._numbers.upload(np.s_[:, :num_rows])
        return with_lora

    def _fill_lora(self, adapters: list[int]) -> None:
        if adapters == self._adapters:
            return
        capacity, most = min(len(adapters), self._num_slots), len(self._lora.host) // 2
        batch = LoRABatch.build(adapters, capacity=capacity)
        assert batch is not None  # some row has an adapter
        self._numbers.host[3, : len(adapters)] = batch.rows
        self._token_slots.host[: len(adapters)] = batch.token_slots
        self._lora.host[:capacity] = batch.slots
        self._lora.host[most : most + capacity + 1] = batch.starts
        self._lora.upload(np.s_[:])
        self._token_slots.upload(np.s_[: len(adapters)])
        self._adapters = adapters


class _Mirror:
    """An array on the host and the tensor on the device that it is copied to."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=not on_cpu)
        self.host = self._host.numpy()
        self.device: Tensor = self._host if on_cpu else torch.zeros_like(self._host, device=device)

    def upload(self, part: object) -> None:
        """Copies a part, given as an index, in the order of the device's work."""
        if self.device is not self._host:
            self.device[part].copy_(self._host[part], non_blocking=True)  # type: ignore[index]
