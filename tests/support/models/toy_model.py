"""ToyModel: a ModelRunner whose logits depend on all that a sequence may see, and nothing else."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise, takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from support.engine.adapter_slots import NamedSlots
from support.models.word_tokenizer import VOCAB_SIZE

from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.kv.storage.groups import KVGroup
from loraplex.engine.kv.tiers import Transfers
from loraplex.engine.sequence import Output, Sequence
from loraplex.engine.step import StepInput, StepOutput
from loraplex.engine.worker.input_batch import InputBatch
from loraplex.engine.worker.sampler import Sampler

CPU = torch.device("cpu")
MARK_BITS = 8
MAX_MARK = (1 << MARK_BITS) - 1
PROMPT_MARK = 0  # of base prompts


def toy_cells(num_blocks: int, block_size: int) -> NDArray[np.int64]:
    """The memory of a model, full of what nobody wrote."""
    return np.random.default_rng(0).integers(1 << 60, size=(num_blocks, block_size))


class ToyModel:
    """Keeps one number per token slot, which is what a token's keys and values are to a model.

    A token's number in a group is a hash of the token, of the adapter in its slot, where that acts
    on the group's layers, and of the numbers that the layers up to there see through the block
    tables. So a wrong table, a lost copy, a stale block or a moved adapter changes what is sampled
    from then on. Beside the number a slot bears the mark of the namespace that wrote it, and
    whoever reads it is checked to be allowed to.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        slots: NamedSlots,
        sampler: Sampler,
        running: Callable[[], Iterable[Sequence]],
    ) -> None:
        """`running`: those that a step may compute; the model looks who may read what."""
        self._kv = kv
        self._running = running
        self._cells = toy_cells(len(kv.pool.blocks), kv.block_size)
        self._transfers: Transfers | None = None  # between tiers, if there are any
        self._marks: dict[str, int] = {}
        self._published: set[tuple[int, ...]] = set()  # base prompts, retired ones too
        self._groups = sorted(enumerate(kv.groups), key=lambda item: max(item[1].layers))
        self._slots = slots
        self._sampler = sampler

    def inherit(self, earlier: "ToyModel") -> None:
        """Knows what the model of an earlier engine knew of the blocks that it left on a disk:
        whose each mark is, and what was published."""
        self._marks, self._published = earlier._marks, earlier._published

    def offload(self, cells: NDArray[np.int64], transfers: Transfers) -> None:
        """Keeps its numbers where `transfers` moves them from and to."""
        self._cells, self._transfers = cells, transfers

    def execute(self, step: StepInput) -> StepOutput:
        self._published.update(prompt.token_ids for prompt in self._kv.prompts)
        for load in step.adapter_loads:
            self._slots.place(load)
        if self._transfers is not None:
            self._transfers.move(step.moves)
        for copy in step.copies:
            self._cells[copy.target] = self._cells[copy.source]
        if not step.seq_ids:
            return StepOutput()
        batch = InputBatch.of(step.tokens, CPU)
        running = {sequence.seq_id: sequence for sequence in self._running()}
        numbers = self._forward(batch, [running[seq_id] for seq_id in step.seq_ids])
        rows = [_logits(numbers[index]) for index in batch.logits_indices.tolist()]
        logits = torch.stack(rows) if rows else torch.empty(0, VOCAB_SIZE)
        return self._sampler.sample(logits, step.rows)

    def _forward(self, batch: InputBatch, sequences: list[Sequence]) -> list[int]:
        """Per row, the number that its logits are made of."""
        tokens, positions = batch.token_ids.tolist(), batch.positions.tolist()
        starts = batch.attention.spans.query_start.tolist()
        targets = [slots.tolist() for slots in batch.attention.slot_mapping]
        lora = batch.hidden_lora
        slots_of_adapters = [-1] * len(tokens) if lora is None else lora.token_slots.tolist()
        numbers = []
        spans = zip(sequences, pairwise(starts), strict=True)
        for place, (sequence, (first, end)) in enumerate(spans):
            reader = self._reader(sequence)
            tables = batch.attention.block_tables[:, place].numpy()
            for row in range(first, end):
                adapter = self._adapter(slots_of_adapters[row])
                number = hash((tokens[row], positions[row]))
                for index, group in self._groups:
                    acting = 0 if reader.is_below(group) else adapter
                    seen = self._visible(reader, group, tables[index], positions[row])
                    number = hash((number, acting, seen)) >> 12
                    if targets[index][row] >= 0:
                        self._cells.flat[targets[index][row]] = number << MARK_BITS | reader.mark
                numbers.append(hash((number, adapter)))
        return numbers

    def _visible(
        self, reader: "_Reader", group: KVGroup, table: np.ndarray, position: int
    ) -> tuple[int, ...]:
        """The numbers before the position that the group's window shows."""
        size, window = self._cells.shape[1], group.state.window
        at = np.arange(0 if window is None else max(0, position - window + 1), position)
        cells = self._cells[table[at // size], at % size]
        reader.check(group, at, cells & MAX_MARK)
        return tuple((cells >> MARK_BITS).tolist())

    def _reader(self, sequence: Sequence) -> "_Reader":
        size, tokens = self._cells.shape[1], tuple(sequence.token_ids)
        common = [_common_length(tokens, prompt) for prompt in self._published]
        whole = [len(p) for p in self._published if tokens[: len(p)] == p]
        return _Reader(
            sequence,
            self._mark(sequence),
            num_public=max(common, default=0) // size * size,
            num_of_prompt=max(whole, default=0),
        )

    def _mark(self, sequence: Sequence) -> int:
        if sequence.output is Output.KEEP:
            return PROMPT_MARK
        return self._marks.setdefault(sequence.namespace, (len(self._marks) + 1) & MAX_MARK)

    def _adapter(self, slot: int) -> int:
        return 0 if slot < 0 else int.from_bytes(self._slots.content[slot].encode())


@dataclass(frozen=True)
class _Reader:
    """A sequence, and what it may read: its own namespace's slots; where the base model fills them
    also whole blocks inside a published prompt, whoever wrote them, and the end of a prompt."""

    sequence: Sequence
    mark: int
    num_public: int  # tokens in whole blocks that a published prompt begins with, too
    num_of_prompt: int  # tokens of the longest published prompt that it begins with

    def is_below(self, group: KVGroup) -> bool:
        """Whether the sequence's adapter leaves the group's layers as they are."""
        return max(group.layers) < self.sequence.frontier

    def check(self, group: KVGroup, positions: np.ndarray, marks: np.ndarray) -> None:
        sequence = self.sequence
        is_base = sequence.adapter is None or self.is_below(group)
        by_base = is_base | (positions < sequence.adapter_start)
        public = (positions < self.num_public) | (
            (positions < self.num_of_prompt) & (marks == PROMPT_MARK)
        )
        readable = (marks == self.mark) | (by_base & public)
        assert readable.all(), f"{sequence.request_id} reads another namespace's blocks"


def _common_length(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in equal)


def _logits(number: int) -> torch.Tensor:
    """[V]: noise that the number alone decides."""
    noise = np.random.default_rng(abs(number)).standard_normal(VOCAB_SIZE)
    return torch.from_numpy(2.0 * noise).float()
