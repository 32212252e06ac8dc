"""SwapManager: evicted KV blocks go to lower tiers, and come back from there."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from loraplex.engine.block_pool import KVCacheBlock
from loraplex.engine.swap.costs import SwapCosts
from loraplex.engine.swap.disk_tier import DiskTier
from loraplex.engine.swap.host_arena import HostArena
from loraplex.engine.swap.host_tier import BlockKey, HostBlock, HostTier
from loraplex.engine.swap.segment import Record
from loraplex.engine.swap.transfers import BlockMoves, Transfers


@dataclass(frozen=True)
class DiskBlock:
    """A block that is on disk only."""

    key: BlockKey
    token_ids: tuple[int, ...]


TierBlock = HostBlock | DiskBlock


@dataclass(frozen=True)
class _Read:
    blocks: list[DiskBlock]
    account: str
    since: float
    done: Future[list[Record | None]]


@dataclass(frozen=True)
class SwapCounts:
    """What was swapped since the start, and what lies in the tiers now. In bytes or blocks."""

    host_bytes: int = 0
    disk_bytes: int = 0
    out_bytes: int = 0
    in_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    host_hits: int = 0  # blocks
    disk_hits: int = 0  # blocks; they count again when they come in from host memory
    dropped: int = 0  # evicted blocks that no tier took
    discarded: int = 0  # blocks that were damaged on disk


class SwapManager:
    """The prefix cache's lower tiers: device blocks, then host memory, then the disk.

    A block that the pool evicts is copied to host memory in the same step, before anything is
    written over it; what host memory evicts goes to the disk. A block that is fetched stays below,
    so that its next eviction costs nothing. Each tier has the same keys as the block pool.
    """

    def __init__(
        self,
        transfers: Transfers,
        arena: HostArena,
        costs: SwapCosts,
        disk: DiskTier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.costs = costs
        self.transfers = transfers
        self.host = HostTier(arena.storage.num_blocks, self._spill)
        self.disk = disk
        self._arena = arena
        self._clock = clock
        self._block_bytes = arena.storage.bytes_per_block
        self._offloads: dict[int, HostBlock] = {}  # of this step, by block id
        self._fetches: dict[int, HostBlock] = {}  # the same
        self._leaving: list[HostBlock] = []  # offloaded in the last step
        self._coming: list[HostBlock] = []  # fetched in the last step
        self._reads: list[_Read] = []
        self._reading: set[BlockKey] = set()
        self._deadlines: dict[int, float] = {}  # until when a sequence waits, by its id
        self._num_out = self._num_in = self._num_disk_hits = self._num_dropped = 0

    def begin_step(self) -> None:
        """Takes in what the last step's copies and the disk have brought."""
        self.transfers.finish()
        for block in self._leaving:
            self.host.arrive(block)
        for block in self._coming:
            self.host.let_go(block)
        self._leaving, self._coming = [], []
        if self.disk is not None:
            self._collect_reads(self.disk)
            self.disk.collect()

    def keep(self, block: KVCacheBlock) -> None:
        """Takes in a block of the pool that is about to be overwritten, if that is worth it."""
        if block.key is None:
            return
        unread = self._fetches.pop(block.block_id, None)
        if unread is not None:  # its sequence has gone again before the step
            self.host.let_go(unread)
            return
        known = self.host.find(block.key, block.token_ids)
        if known is not None:
            self.host.touch(known)
            return
        reserved = None
        if self.costs.is_worth_keeping():
            reserved = self.host.reserve(block.key, block.token_ids, block.account)
        if reserved is None:
            self._num_dropped += 1
        else:
            self._offloads[block.block_id] = reserved

    def find(self, key: BlockKey, token_ids: tuple[int, ...]) -> TierBlock | None:
        """The block with this content in whatever tier, also if it is only on its way."""
        block = self.host.find(key, token_ids)
        if block is None and self.disk is not None and key in self.disk:
            return DiskBlock(key, token_ids)
        return block

    def find_here(self, key: BlockKey, token_ids: tuple[int, ...]) -> HostBlock | None:
        """The block with this content, if it can be fetched in this step."""
        block = self.host.find(key, token_ids)
        return block if block is not None and block.is_here else None

    def await_blocks(
        self, seq_id: int, account: str, blocks: list[TierBlock], num_tokens: int
    ) -> bool:
        """Whether a sequence should wait for blocks that are not here: starts to read them.

        Args:
            num_tokens: what the sequence need not compute if it gets them.
        """
        on_disk = [block for block in blocks if isinstance(block, DiskBlock)]
        if seq_id not in self._deadlines:
            too_many = len(on_disk) > self.host.num_slots // 2
            if too_many or (on_disk and not self.costs.is_worth_reading(len(on_disk), num_tokens)):
                return False
            self._deadlines[seq_id] = self._clock() + self.costs.patience(num_tokens)
        if self._clock() >= self._deadlines[seq_id]:
            return False
        self._start_read([b for b in on_disk if b.key not in self._reading], account)
        return True

    def is_awaiting(self, seq_id: int) -> bool:
        """Whether a sequence waits for a read that is not done."""
        return (
            seq_id in self._deadlines
            and self._clock() < self._deadlines[seq_id]
            and any(not read.done.done() for read in self._reads)
        )

    def forget(self, seq_id: int) -> None:
        """A sequence waits no more."""
        self._deadlines.pop(seq_id, None)

    def hold(self, block: HostBlock) -> None:
        """Keeps a block here until it is fetched in this step, which must follow."""
        self.host.hold(block)

    def fetch(self, block: HostBlock, block_id: int) -> None:
        """Copies a held block to the device in this step."""
        self._fetches[block_id] = block

    def take_moves(self) -> BlockMoves:
        """What this step moves; the caller does it, once."""
        moves = BlockMoves(
            [(block_id, block.slot) for block_id, block in self._offloads.items()],
            [(block.slot, block_id) for block_id, block in self._fetches.items()],
        )
        self._leaving += self._offloads.values()
        self._coming += self._fetches.values()
        self._num_out += len(moves.offloads)
        self._num_in += len(moves.fetches)
        self._offloads, self._fetches = {}, {}
        return moves

    def bytes_by_account(self) -> dict[str, int]:
        """What each account has in all lower tiers."""
        usage = {account: n * self._block_bytes for account, n in self.host.usage.items()}
        on_disk = self.disk.usage if self.disk is not None else {}
        return {a: usage.get(a, 0) + on_disk.get(a, 0) for a in {**usage, **on_disk}}

    def counts(self) -> SwapCounts:
        disk = self.disk
        return SwapCounts(
            host_bytes=len(self.host) * self._block_bytes,
            disk_bytes=disk.num_bytes if disk else 0,
            out_bytes=self._num_out * self._block_bytes,
            in_bytes=self._num_in * self._block_bytes,
            written_bytes=disk.num_written_bytes if disk else 0,
            read_bytes=disk.num_read_bytes if disk else 0,
            host_hits=self._num_in,
            disk_hits=self._num_disk_hits,
            dropped=self._num_dropped,
            discarded=disk.num_discarded if disk else 0,
        )

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()

    def check_integrity(self) -> None:
        """As the tiers' own.

        Raises:
            RuntimeError: naming what is wrong.
        """
        self.host.check_integrity()
        if self.disk is not None:
            self.disk.check_integrity()

    def _spill(self, block: HostBlock) -> None:
        """Hands to the disk what host memory has no more room for."""
        if self.disk is not None and block.key in self.disk:
            return
        taken = False
        if self.disk is not None and self.costs.is_worth_writing():
            content = self._arena.read(block.slot)
            taken = self.disk.put(block.account, Record(block.key, block.token_ids, content))
        self._num_dropped += not taken

    def _start_read(self, blocks: list[DiskBlock], account: str) -> None:
        if self.disk is not None and blocks:
            done = self.disk.read([block.key for block in blocks])
            self._reads.append(_Read(blocks, account, self._clock(), done))
            self._reading.update(block.key for block in blocks)

    def _collect_reads(self, disk: DiskTier) -> None:
        for read in [read for read in self._reads if read.done.done()]:
            self._reads.remove(read)
            keys = [block.key for block in read.blocks]
            self._reading.difference_update(keys)
            self.costs.note_read(len(keys), self._clock() - read.since)
            for block, record in zip(read.blocks, disk.judge(keys, read.done), strict=True):
                if record is not None and record.token_ids == block.token_ids:
                    self._take_in(block, record, read.account)

    def _take_in(self, block: DiskBlock, record: Record, account: str) -> None:
        if self.host.find(block.key, block.token_ids) is not None:
            return  # it was offloaded meanwhile
        reserved = self.host.reserve(block.key, block.token_ids, account)
        if reserved is not None:
            self._arena.write(reserved.slot, record.content)
            self.host.arrive(reserved)
            self._num_disk_hits += 1
