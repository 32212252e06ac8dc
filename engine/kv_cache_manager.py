"""KVCacheManager: the block tables of all sequences, over one BlockPool."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loraplex.engine.block_key import BASE, BlockKeyScope
from loraplex.engine.block_pool import NULL_BLOCK_ID, BlockPool, KVCacheBlock
from loraplex.engine.kv_groups import KVGroup
from loraplex.engine.sequence import Sequence


@dataclass(frozen=True)
class BlockCopy:
    source: int
    target: int


@dataclass(frozen=True)
class CachedPrefix:
    """Blocks that already hold the beginning of a sequence; nobody's until they are allocated."""

    num_tokens: int
    blocks: list[list[KVCacheBlock]]  # per group; the null block where the window has passed

    @property
    def num_blocks(self) -> int:
        return sum(block.block_id != NULL_BLOCK_ID for row in self.blocks for block in row)


@dataclass
class BlockTable:
    """One sequence's blocks, per KV group; `ids` mirrors `blocks` for the device."""

    blocks: list[list[KVCacheBlock]]
    ids: NDArray[np.int32]  # [groups, max blocks]
    num_passed: list[int]  # per group: blocks behind the window
    num_remembered: int = 0  # full blocks that the prefix cache was offered

    def append(self, group: int, block: KVCacheBlock) -> None:
        self.ids[group, len(self.blocks[group])] = block.block_id
        self.blocks[group].append(block)

    def replace(self, group: int, index: int, block: KVCacheBlock) -> None:
        self.blocks[group][index] = block
        self.ids[group, index] = block.block_id


class KVCacheManager:
    """Gives sequences blocks, shares what is equal, copies what is written.

    One block of a sequence in one group holds `block_size` tokens for all layers of the group.
    A shared block is only read; the first sequence to write into one gets a copy of it first
    (`take_copies`), so no sequence can change what another sees.
    """

    def __init__(
        self,
        pool: BlockPool,
        groups: list[KVGroup],
        block_size: int,
        max_model_len: int,
        scope: BlockKeyScope,
    ) -> None:
        self.pool = pool
        self.groups = groups
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        self.num_copied_blocks = 0
        self._scope = scope
        self._tables: dict[int, BlockTable] = {}
        self._used_tokens: dict[int, int] = {}
        self._copies: list[BlockCopy] = []

    def find_cached(self, sequence: Sequence) -> CachedPrefix:
        """The longest cached beginning of a sequence: whole blocks, and never its last token, whose
        logits are needed."""
        self._extend_keys(sequence)
        limit = self._num_cacheable(sequence)
        found = [self._lookup(sequence, group, limit) for group in range(len(self.groups))]
        num_blocks = self._agree(found, limit)
        blocks = [
            [
                block if index >= self._num_passed(group, num_blocks * self.block_size) else None
                for index, block in enumerate(found[group][:num_blocks])
            ]
            for group in range(len(self.groups))
        ]
        return CachedPrefix(
            num_blocks * self.block_size,
            [[block or self.pool.null_block for block in row] for row in blocks],
        )

    def next_key(self, sequence: Sequence, cached: CachedPrefix) -> bytes | None:
        """The key of the first block that a cached prefix lacks; None if it lacks none."""
        index = cached.num_tokens // self.block_size
        return sequence.block_keys[index] if index < self._num_cacheable(sequence) else None

    def completed_keys(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Keys of the blocks that become full when the next `num_tokens` are computed."""
        start = sequence.num_computed_tokens
        full = slice(start // self.block_size, (start + num_tokens) // self.block_size)
        return sequence.block_keys[full]

    def num_held_blocks(self, sequence: Sequence) -> int:
        table = self._tables.get(sequence.seq_id)
        if table is None:
            return 0
        return sum(
            len(row) - passed for row, passed in zip(table.blocks, table.num_passed, strict=True)
        )

    def num_unheld_blocks(self, cached: CachedPrefix) -> int:
        """How many of the cached blocks nobody holds now: sharing these takes free blocks."""
        return sum(
            block.ref_count == 0 and block is not self.pool.null_block
            for row in cached.blocks
            for block in row
        )

    def admit(self, sequence: Sequence, cached: CachedPrefix) -> None:
        """Opens a table that starts with the cached prefix."""
        table = BlockTable(
            blocks=[[] for _ in self.groups],
            ids=np.full((len(self.groups), self.max_blocks), NULL_BLOCK_ID, np.int32),
            num_passed=[self._num_passed(g, cached.num_tokens) for g in range(len(self.groups))],
            num_remembered=cached.num_tokens // self.block_size,
        )
        for group, row in enumerate(cached.blocks):
            for block in row:
                if block is not self.pool.null_block:
                    self.pool.share(block)
                table.append(group, block)
        self._tables[sequence.seq_id] = table
        self._used_tokens[sequence.seq_id] = cached.num_tokens
        sequence.num_computed_tokens = cached.num_tokens

    def allocate_slots(self, sequence: Sequence, num_new_tokens: int) -> bool:
        """Makes the next tokens' slots writable: new blocks, and a copy of a shared last one.

        Returns:
            False when there are too few free blocks; then only blocks behind the window have gone.
        """
        table = self._tables[sequence.seq_id]
        self._free_passed(sequence, table)
        start = sequence.num_computed_tokens
        num_blocks = -(-(start + num_new_tokens) // self.block_size)
        shared = self._shared_tail(table, start)
        needed = sum(num_blocks - len(row) for row in table.blocks) + len(shared)
        if needed > self.pool.num_available(sequence.tenant):
            return False
        for group in shared:
            target = self.pool.allocate(sequence.tenant)
            self._copy_on_write(table, group, start // self.block_size, target)
        for group, row in enumerate(table.blocks):
            for _ in range(num_blocks - len(row)):
                table.append(group, self.pool.allocate(sequence.tenant))
        self._used_tokens[sequence.seq_id] = start + num_new_tokens
        return True

    def remember_computed(self, sequence: Sequence) -> None:
        """Offers the sequence's full computed blocks to the prefix cache."""
        self._extend_keys(sequence)
        table = self._tables[sequence.seq_id]
        full = sequence.num_computed_tokens // self.block_size
        for index in range(table.num_remembered, full):
            tokens = self._tokens_of(sequence, index)
            for group, row in enumerate(table.blocks):
                if row[index] is not self.pool.null_block:
                    self.pool.remember(row[index], group, sequence.block_keys[index], tokens)
        table.num_remembered = full

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives the child the parent's blocks by reference."""
        table = self._tables[parent.seq_id]
        for row in table.blocks:
            for block in row:
                if block is not self.pool.null_block:
                    self.pool.share(block)
        self._tables[child.seq_id] = BlockTable(
            [list(row) for row in table.blocks],
            table.ids.copy(),
            list(table.num_passed),
            table.num_remembered,
        )
        self._used_tokens[child.seq_id] = self._used_tokens[parent.seq_id]

    def free(self, sequence: Sequence) -> None:
        """Drops the sequence's table; a sequence without one is left alone."""
        table = self._tables.pop(sequence.seq_id, None)
        if table is None:
            return
        del self._used_tokens[sequence.seq_id]
        for row in table.blocks:  # the end of a prefix is of less use than its beginning
            self.pool.release(reversed(row))

    def block_ids(self, sequence: Sequence) -> NDArray[np.int32]:
        """[groups, max blocks]; the null block where nothing is held."""
        return self._tables[sequence.seq_id].ids

    def take_copies(self) -> list[BlockCopy]:
        """Copies to be made before this step writes; the caller makes them, once, in order."""
        copies, self._copies = self._copies, []
        return copies

    def slots(self) -> tuple[int, int]:
        """(allocated, used) token slots over all groups; a shared block counts once.

        A slot behind the window in a block that is still needed counts as used: it was.
        """
        held = {b.block_id for t in self._tables.values() for row in t.blocks for b in row}
        held.discard(NULL_BLOCK_ID)
        allocated = len(held) * self.block_size
        unused: dict[int, int] = {}
        for seq_id, table in self._tables.items():
            for row in table.blocks:
                self._count_unused(row, self._used_tokens[seq_id], unused)
        return allocated, allocated - sum(unused.values())

    def check_integrity(self) -> None:
        """Proves that the reference counts are exactly what the tables hold.

        Raises:
            RuntimeError: naming what is wrong.
        """
        holders = Counter(
            block.block_id
            for table in self._tables.values()
            for row in table.blocks
            for block in row
        )
        del holders[NULL_BLOCK_ID]
        self.pool.check_integrity(holders)
        for table in self._tables.values():
            for group, row in enumerate(table.blocks):
                ids = [block.block_id for block in row]
                if (
                    ids != table.ids[group, : len(row)].tolist()
                    or table.ids[group, len(row) :].any()
                ):
                    raise RuntimeError("a block table's device mirror differs from its blocks")

    def _count_unused(
        self, row: list[KVCacheBlock], used_tokens: int, unused: dict[int, int]
    ) -> None:
        for index in range(used_tokens // self.block_size, len(row)):
            block_id = row[index].block_id
            empty = self.block_size - max(0, used_tokens - index * self.block_size)
            unused[block_id] = min(empty, unused.get(block_id, self.block_size))

    def _num_cacheable(self, sequence: Sequence) -> int:
        """Blocks that may come from the cache: the last token is always computed."""
        if sequence.owes_prompt_logprobs:
            return 0
        return (sequence.num_tokens - 1) // self.block_size

    def _lookup(self, sequence: Sequence, group: int, limit: int) -> list[KVCacheBlock | None]:
        """The cached block of each index below the limit; full attention stops at the first gap."""
        found: list[KVCacheBlock | None] = []
        for index in range(min(limit, len(sequence.block_keys))):
            tokens = self._tokens_of(sequence, index)
            block = self.pool.find(group, sequence.block_keys[index], tokens)
            if block is None and self.groups[group].window is None:
                break
            found.append(block)
        return found

    def _agree(self, found: list[list[KVCacheBlock | None]], limit: int) -> int:
        """The largest number of blocks for which every group has all that it needs."""
        best = min(limit, *(len(row) for row in found))  # up to there full attention has no gap
        sliding = [g for g in range(len(found)) if self.groups[g].window is not None]
        for num_blocks in range(best, 0, -1):
            if all(
                all(found[g][self._num_passed(g, num_blocks * self.block_size) : num_blocks])
                for g in sliding
            ):
                return num_blocks
        return 0

    def _num_passed(self, group: int, num_computed_tokens: int) -> int:
        """Blocks that no later query of the group sees."""
        window = self.groups[group].window
        if window is None:
            return 0
        return max(0, num_computed_tokens - window + 1) // self.block_size

    def _free_passed(self, sequence: Sequence, table: BlockTable) -> None:
        for group, row in enumerate(table.blocks):
            passed = min(self._num_passed(group, sequence.num_computed_tokens), len(row))
            for index in range(table.num_passed[group], passed):
                self.pool.release([row[index]])
                table.replace(group, index, self.pool.null_block)
            table.num_passed[group] = max(passed, table.num_passed[group])

    def _shared_tail(self, table: BlockTable, start: int) -> list[int]:
        """Groups whose block at the next token is half full and held by others too."""
        index, offset = divmod(start, self.block_size)
        if offset == 0:
            return []
        return [group for group, row in enumerate(table.blocks) if row[index].ref_count > 1]

    def _copy_on_write(
        self, table: BlockTable, group: int, index: int, target: KVCacheBlock
    ) -> None:
        source = table.blocks[group][index]
        self._copies.append(BlockCopy(source.block_id, target.block_id))
        table.replace(group, index, target)
        self.pool.release([source])
        self.num_copied_blocks += 1

    def _extend_keys(self, sequence: Sequence) -> None:
        for index in range(len(sequence.block_keys), sequence.num_tokens // self.block_size):
            adapter = self._effective_adapter(sequence, index * self.block_size)
            parent = sequence.block_keys[-1] if sequence.block_keys else None
            tokens = self._tokens_of(sequence, index)
            sequence.block_keys.append(self._scope.key(parent, tokens, sequence.namespace, adapter))

    def _effective_adapter(self, sequence: Sequence, start: int) -> bytes:
        """What acts on the block that begins at `start`, and from which of its tokens on.

        Two prompts can agree on a block and yet activate the same adapter at different places in
        it, since what follows decides which invocation is the last.
        """
        if sequence.adapter is None or sequence.adapter_start >= start + self.block_size:
            return BASE
        offset = max(0, sequence.adapter_start - start)
        return f"{sequence.adapter.digest}+{offset}".encode()

    def _tokens_of(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        start = index * self.block_size
        return tuple(sequence.token_ids[start : start + self.block_size])
