"""ToyModel: a ModelRunner whose logits depend on all that a sequence may see, and nothing else."""

from itertools import pairwise

import numpy as np
import torch
from support.adapter_slots import NamedSlots
from support.word_tokenizer import VOCAB_SIZE

from loraplex.engine.block_storage import BlockStorage
from loraplex.engine.flat_step import flatten, logits_rows
from loraplex.engine.input_batch import InputBatch
from loraplex.engine.kv_cache_manager import KVCacheManager
from loraplex.engine.sampler import Sampler
from loraplex.engine.scheduler import ModelRunnerOutput, SchedulerOutput
from loraplex.engine.sequence import Sequence
from loraplex.engine.swap.transfers import Transfers
from loraplex.kernels.dispatch import NAIVE

CPU = torch.device("cpu")
MARK_BITS = 8
MAX_MARK = (1 << MARK_BITS) - 1
PROMPT_MARK = 0  # of base prompts


class ToyModel:
    """Keeps one number per token slot, which is what a token's keys and values are to a model.

    A token's number is a hash of the token, of the adapter in its slot and of the numbers that it
    sees through the block tables, group by group. So a wrong table, a lost copy, a stale block or
    a moved adapter changes what is sampled from then on. Beside the number a slot bears the mark of
    the namespace that wrote it, and whoever reads it is checked to be allowed to.
    """

    def __init__(self, kv: KVCacheManager, slots: NamedSlots, sampler: Sampler) -> None:
        self._cells = np.random.default_rng(0).integers(
            1 << 60, size=(len(kv.pool.blocks), kv.block_size)
        )
        self.transfers: Transfers | None = None  # between tiers, if there are any
        self._marks: dict[str, int] = {}
        self._windows = [group.window for group in kv.groups]
        self._slots = slots
        self._sampler = sampler

    @property
    def storage(self) -> BlockStorage:
        """The same numbers, as memory that can be swapped."""
        return BlockStorage([torch.from_numpy(self._cells)], NAIVE)

    def execute(self, output: SchedulerOutput, kv: KVCacheManager) -> ModelRunnerOutput:
        if self.transfers is not None:
            self.transfers.move(output.moves)
        for copy in output.copies:
            self._cells[copy.target] = self._cells[copy.source]
        if not output.scheduled:
            return ModelRunnerOutput()
        batch = InputBatch.of(flatten(output.scheduled, kv), CPU)
        numbers = self._forward(batch, [item.sequence for item in output.scheduled])
        rows = [_logits(numbers[index]) for index in batch.logits_indices.tolist()]
        logits = torch.stack(rows) if rows else torch.empty(0, VOCAB_SIZE)
        return self._sampler.sample(logits, logits_rows(output.scheduled))

    def _forward(self, batch: InputBatch, sequences: list[Sequence]) -> list[int]:
        tokens = batch.token_ids.tolist()
        positions = batch.positions.tolist()
        starts = batch.attention.spans.query_start.tolist()
        lora = batch.hidden_lora
        slots_of_adapters = [-1] * len(tokens) if lora is None else lora.token_slots.tolist()
        numbers = []
        spans = zip(sequences, pairwise(starts), strict=True)
        for index, (sequence, (first, end)) in enumerate(spans):
            tables = batch.attention.block_tables[:, index].numpy()
            for row in range(first, end):
                seen = self._visible(sequence, tables, positions[row])
                adapter = self._adapter(slots_of_adapters[row])
                number = hash((tokens[row], positions[row], adapter, seen)) >> 12
                content = number << MARK_BITS | self._mark(sequence)
                for slots in batch.attention.slot_mapping:
                    if slots[row] >= 0:
                        self._cells.flat[int(slots[row])] = content
                numbers.append(number)
        return numbers

    def _visible(
        self, sequence: Sequence, tables: np.ndarray, position: int
    ) -> tuple[tuple[int, ...], ...]:
        """Per group, the numbers before the position that its window shows."""
        size = self._cells.shape[1]
        seen = []
        for table, window in zip(tables, self._windows, strict=True):
            first = 0 if window is None else max(0, position - window + 1)
            at = np.arange(first, position)
            cells = self._cells[table[at // size], at % size]
            self._check_readable(sequence, cells & MAX_MARK, at // size)
            seen.append(tuple((cells >> MARK_BITS).tolist()))
        return tuple(seen)

    def _check_readable(self, sequence: Sequence, marks: np.ndarray, blocks: np.ndarray) -> None:
        """A sequence reads its own namespace, public blocks, and the half-full end of a prompt."""
        public = sequence.block_keys.num_public
        readable = (marks == self._mark(sequence)) | (blocks < public)
        readable |= (blocks == public) & (marks == PROMPT_MARK)
        assert readable.all(), f"{sequence.request_id} reads another namespace's blocks"

    def _mark(self, sequence: Sequence) -> int:
        if sequence.is_base_prompt:
            return PROMPT_MARK
        return self._marks.setdefault(sequence.namespace, (len(self._marks) + 1) & MAX_MARK)

    def _adapter(self, slot: int) -> int:
        return 0 if slot < 0 else int.from_bytes(self._slots.content[slot].encode())


def _logits(number: int) -> torch.Tensor:
    """[V]: noise that the number alone decides."""
    noise = np.random.default_rng(abs(number)).standard_normal(VOCAB_SIZE)
    return torch.from_numpy(2.0 * noise).float()
