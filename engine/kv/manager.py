"""KVCacheManager: the block tables of all sequences, over one BlockPool."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from loraplex.engine.kv.admission_plan import AdmissionPlan, AdmissionPlanner
from loraplex.engine.kv.block_pool import NULL_BLOCK_ID, BlockPool, KVCacheBlock
from loraplex.engine.kv.block_table import BlockTable
from loraplex.engine.kv.demand import BlockDemand
from loraplex.engine.kv.keys import BlockKeyScope, PrefixKeys, tokens_of
from loraplex.engine.kv.pinned_prompts import PinnedPrompt, PinnedPrompts
from loraplex.engine.kv.prefix_lookup import CachedPrefix, Fetch, PrefixLookup
from loraplex.engine.kv.storage.layout import KVLayout
from loraplex.engine.kv.tiers import LowerTiers
from loraplex.engine.sequence import Sequence
from loraplex.engine.step import BlockCopy


class KVCacheManager:
    """Allocates blocks to sequences, shares equal ones, and copies shared ones before they are
    written.

    One block of a sequence in one group holds `block_size` tokens for all layers of the group. A
    shared block is only read; the first sequence to write into one gets a copy of it first
    (`take_copies`), so no sequence can change what another sees.
    """

    def __init__(
        self,
        pool: BlockPool,
        layout: KVLayout,
        scope: BlockKeyScope,
        tiers: LowerTiers | None = None,
    ) -> None:
        """`tiers`: receive what the pool evicts; None: evicted content is lost."""
        groups, block_size = layout.groups, layout.block_size
        self.pool = pool
        self.layout = layout
        self.groups = groups
        self.block_size = block_size
        self.max_blocks = layout.max_blocks
        self.num_copied_blocks = 0
        self.tiers = tiers or LowerTiers()
        self.prompts = PinnedPrompts(scope, block_size)
        self._keys = PrefixKeys(scope, block_size, groups, self.prompts)
        self._demand = BlockDemand(layout, pool.budgets)
        lookup = PrefixLookup(pool, groups, block_size, self._keys, self.prompts)
        self._planner = AdmissionPlanner(lookup, self._keys, layout, self._demand, self.tiers)
        self._tables: dict[int, BlockTable] = {}
        self._used_tokens: dict[int, int] = {}
        self._copies: list[BlockCopy] = []

    def plan(self, sequence: Sequence) -> AdmissionPlan:
        """Plans the admission of a waiting sequence. Allocates nothing; only blocks on disk that
        are worth waiting for are requested."""
        return self._planner.plan(sequence)

    def commit(self, plan: AdmissionPlan, num_new_tokens: int) -> list[bytes]:
        """Opens the table of an admitted sequence: it starts with the cached prefix and has
        writable slots for the next tokens.

        Args:
            num_new_tokens: at most those that the plan says are left to compute.

        Returns:
            keys of the blocks that become full when these are computed.
        """
        sequence, cached = plan.sequence, plan.cached
        for fetch in cached.fetches:  # allocating below may evict in every tier
            self.tiers.pin(fetch.block)
        table = self._tables[sequence.seq_id] = self._table_on(cached, sequence.tenant)
        for fetch in cached.fetches:
            self._fetch(sequence, table, fetch)
        self.tiers.forget(sequence.seq_id)
        sequence.num_computed_tokens = cached.num_tokens
        self._allocate(sequence, num_new_tokens, self._shared_tail(table, cached.num_tokens))
        return self.completed_keys(sequence, num_new_tokens)

    def promised(self, sequence: Sequence) -> int:
        """Returns the blocks that a running sequence was admitted for and does not have yet."""
        if sequence.num_uncomputed_tokens <= 1 and not sequence.num_preemptions:
            return 0
        held = self._tables[sequence.seq_id].num_held
        return self._demand.missing(sequence, held, sum(held))

    def completed_keys(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Returns the keys of the blocks that the next `num_tokens` computed tokens fill."""
        start = sequence.num_computed_tokens
        full = slice(start // self.block_size, (start + num_tokens) // self.block_size)
        return self._keys.leading(sequence)[full]

    def num_held_blocks(self, sequence: Sequence) -> int:
        table = self._tables.get(sequence.seq_id)
        return 0 if table is None else sum(table.num_held)

    def held_blocks(self, sequence: Sequence) -> list[KVCacheBlock]:
        table = self._tables.get(sequence.seq_id)
        rows = table.blocks if table is not None else []
        return [block for row in rows for block in row if block is not self.pool.null_block]

    def num_public_blocks(self, sequence: Sequence) -> list[int]:
        """Returns, per group, the leading blocks that belong to a published base prompt."""
        self._keys.extend(sequence)
        return [self._keys.num_public(sequence, group) for group in range(len(self.groups))]

    def allocate_slots(self, sequence: Sequence, num_new_tokens: int) -> bool:
        """Makes the next tokens' slots writable: allocates blocks, and copies a shared last one.

        Returns:
            False when there are too few free blocks; then only blocks behind the window have gone.
        """
        table = self._tables[sequence.seq_id]
        start = sequence.num_computed_tokens
        self._free_skipped(sequence, start)
        shared = self._shared_tail(table, start)
        counts = zip(self.layout.num_blocks(start + num_new_tokens), table.blocks, strict=True)
        needed = sum(max(0, count - len(row)) for count, row in counts) + len(shared)
        if needed > self.pool.num_available(sequence.tenant):
            return False
        self._allocate(sequence, num_new_tokens, shared)
        return True

    def index_computed(self, sequence: Sequence) -> None:
        """Indexes the sequence's full computed blocks in the prefix cache."""
        self._keys.extend(sequence)
        table = self._tables[sequence.seq_id]
        full = sequence.num_computed_tokens // self.block_size
        for index in range(table.num_indexed, full):
            tokens = tokens_of(sequence, index, self.block_size)
            for group, row in enumerate(table.blocks):
                if row[index] is not self.pool.null_block:
                    key = self._keys.of(sequence, group)[index]
                    self.pool.index(row[index], group, key, tokens)
        table.num_indexed = full

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives the child the parent's blocks by reference."""
        table = self._tables[parent.seq_id]
        for row in table.blocks:
            for block in row:
                if block is not self.pool.null_block:
                    self.pool.retain(block, child.tenant)
        self._tables[child.seq_id] = table.copy()
        self._used_tokens[child.seq_id] = self._used_tokens[parent.seq_id]

    def free(self, sequence: Sequence) -> None:
        """Drops the sequence's table, if it has one."""
        self.tiers.forget(sequence.seq_id)
        table = self._tables.pop(sequence.seq_id, None)
        if table is None:
            return
        del self._used_tokens[sequence.seq_id]
        for row in table.blocks:  # the end of a prefix is of less use than its beginning
            self.pool.release(reversed(row), sequence.tenant, sequence.num_tokens)

    def block_ids(self, sequence: Sequence) -> NDArray[np.int32]:
        """Returns the block ids [groups, max blocks]; the null block where no block is held."""
        return self._tables[sequence.seq_id].ids

    def first_writable(self, sequence: Sequence) -> NDArray[np.int64]:
        """Returns the positions [groups] from which on the sequence writes. Slots before them,
        computed or not, hold the same values already."""
        return self._tables[sequence.seq_id].first_writable

    def pin(self, prompt: PinnedPrompt) -> None:
        """Pins what requests can share of a computed base prompt: its end, and as much before it as
        the windows show. The rest stays cached as long as the memory is not needed."""
        sequence = prompt.sequence
        whole = (prompt.num_tokens - 1) // self.block_size * self.block_size
        table = self._tables[sequence.seq_id]
        self._free_skipped(sequence, whole)
        for block in self.held_blocks(sequence):
            if block.account != sequence.tenant:  # a tenant was quicker
                self.pool.recharge(block, sequence.tenant)
        prompt.end = tuple(row[-1] for row in table.blocks)
        prompt.is_ready = True

    def take_copies(self) -> list[BlockCopy]:
        """Returns the copies to be made before this step writes; the caller makes them once, in
        order."""
        copies, self._copies = self._copies, []
        return copies

    def slots(self) -> tuple[int, int]:
        """Returns (allocated, used) token slots over all groups; a shared block counts once.

        A slot behind the window in a block that is still needed counts as used. Only the ends of
        tables are visited, so the cost does not depend on the sequences' lengths.
        """
        allocated = (self.pool.num_blocks - self.pool.num_free) * self.block_size
        unused: dict[int, int] = {}
        for seq_id, table in self._tables.items():
            for row, written in zip(table.blocks, table.first_writable.tolist(), strict=True):
                self._count_unused(row, max(written, self._used_tokens[seq_id]), unused)
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
        self.tiers.check_integrity()
        for table in self._tables.values():
            table.check()

    def _table_on(self, cached: CachedPrefix, tenant: str) -> BlockTable:
        """Returns a table of the cached blocks, each with one more holder."""
        table = BlockTable.empty(len(self.groups), self.max_blocks)
        table.num_skipped = self.layout.num_skipped(cached.num_tokens)
        for group, row in enumerate(cached.blocks):
            table.first_writable[group] = max(cached.num_tokens, len(row) * self.block_size)
            blocks = [*row, *cached.end[group : group + 1]]
            for block in blocks:
                if block is not self.pool.null_block:
                    self.pool.retain(block, tenant)
            table.extend(group, blocks)
        table.num_indexed = cached.num_tokens // self.block_size
        return table

    def _allocate(self, sequence: Sequence, num_new_tokens: int, shared: list[int]) -> None:
        """Allocates the blocks that the next tokens need, and copies those that are `shared`."""
        table, start = self._tables[sequence.seq_id], sequence.num_computed_tokens
        for group in shared if num_new_tokens else ():
            target = self.pool.allocate(sequence.tenant)
            self._copy_on_write(sequence, group, start // self.block_size, target)
        for group, count in enumerate(self.layout.num_blocks(start + num_new_tokens)):
            for _ in range(count - len(table.blocks[group])):
                table.append(group, self.pool.allocate(sequence.tenant))
        self._used_tokens[sequence.seq_id] = start + num_new_tokens

    def _count_unused(
        self, row: list[KVCacheBlock], used_tokens: int, unused: dict[int, int]
    ) -> None:
        for index in range(used_tokens // self.block_size, len(row)):
            block_id = row[index].block_id
            empty = self.block_size - max(0, used_tokens - index * self.block_size)
            unused[block_id] = min(empty, unused.get(block_id, self.block_size))

    def _free_skipped(self, sequence: Sequence, num_computed_tokens: int) -> None:
        table = self._tables[sequence.seq_id]
        ends = self.layout.num_skipped(num_computed_tokens)
        for group, (row, end) in enumerate(zip(table.blocks, ends, strict=True)):
            passed = min(end, len(row))
            for index in range(table.num_skipped[group], passed):
                self.pool.release([row[index]], sequence.tenant, sequence.num_tokens)
                table.replace(group, index, self.pool.null_block)
            table.num_skipped[group] = max(passed, table.num_skipped[group])

    def _fetch(self, sequence: Sequence, table: BlockTable, fetch: Fetch) -> None:
        """Adds a new block to which a lower tier's content is fetched before the step."""
        block = self.pool.allocate(sequence.tenant)
        group, key = fetch.block.key
        self.pool.index(block, group, key, fetch.block.token_ids)
        self.tiers.fetch(fetch.block, block.block_id)
        table.replace(fetch.group, fetch.index, block)

    def _shared_tail(self, table: BlockTable, start: int) -> list[int]:
        """Returns the groups that would write the next token into a block that other tables hold
        too."""
        index = start // self.block_size
        return [
            number
            for number, group in enumerate(self.groups)
            if group.state.copies_on_fork(start, self.block_size)
            and table.blocks[number][index].ref_count > 1
            and start >= table.first_writable[number]
        ]

    def _copy_on_write(
        self, sequence: Sequence, group: int, index: int, target: KVCacheBlock
    ) -> None:
        table = self._tables[sequence.seq_id]
        source = table.blocks[group][index]
        self._copies.append(BlockCopy(source.block_id, target.block_id))
        table.replace(group, index, target)
        self.pool.release([source], sequence.tenant, sequence.num_tokens)
        self.num_copied_blocks += 1
