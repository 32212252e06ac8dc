"""OffloadManager: offloads evicted KV blocks to lower tiers, and fetches them back."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from loraplex.engine.kv.block_pool import KVCacheBlock
from loraplex.engine.kv.metering import Metering
from loraplex.engine.kv.offload.costs import OffloadCosts
from loraplex.engine.kv.offload.disk_tier import DiskTier
from loraplex.engine.kv.offload.host_tier import HostTier
from loraplex.engine.kv.offload.segment import Record
from loraplex.engine.kv.tiers import (
    BlockKey,
    DiskBlock,
    HostBlock,
    HostSlots,
    LowerTiers,
    TierBlock,
    Transfers,
)
from loraplex.engine.protocol import OffloadStats
from loraplex.engine.step import BlockMoves

SAVE_SECONDS = 5.0  # for writing what is in memory, before the end
SAVE_BYTES = 16 << 20  # that are written between two looks at the clock


@dataclass
class _Wait:
    """What a sequence waits for."""

    deadline: float
    keys: set[BlockKey]  # of blocks on disk


@dataclass(frozen=True)
class _Read:
    blocks: list[DiskBlock]
    account: str
    since: float
    done: Future[list[Record | None]]


class OffloadManager(LowerTiers):
    """The prefix cache's lower tiers: device blocks, then host memory, then the disk.

    A block that the pool evicts is copied to host memory in the same step, before it is
    overwritten; what host memory evicts goes to the disk. A fetched block also stays below, so that
    its next eviction costs nothing. Each tier uses the same keys as the block pool.
    """

    def __init__(
        self,
        transfers: Transfers,
        arena: HostSlots,
        costs: OffloadCosts,
        metering: Metering,
        *,
        disk: DiskTier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.costs = costs
        self.transfers = transfers
        self.host = HostTier(arena.num_slots, self._spill, clock)
        self.disk = disk
        self.arena = arena
        self._metering = metering
        self._clock = clock
        self._block_bytes = arena.bytes_per_slot
        self._offloads: dict[int, HostBlock] = {}  # of this step, by block id
        self._fetches: dict[int, HostBlock] = {}  # the same
        self._leaving: list[HostBlock] = []  # offloaded in the last step
        self._coming: list[HostBlock] = []  # fetched in the last step
        self._reads: list[_Read] = []
        self._reading: set[BlockKey] = set()
        self._waits: dict[int, _Wait] = {}  # by sequence id
        self._num_out = self._num_in = self._num_disk_hits = self._num_dropped = 0

    def begin_step(self) -> None:
        """As `LowerTiers.begin_step`."""
        self.transfers.finish()
        for block in self._leaving:
            self.host.arrive(block)
        for block in self._coming:
            self.host.unpin(block)
        self._leaving, self._coming = [], []
        if self.disk is not None:
            self._collect_reads(self.disk)
            self.disk.collect()

    def offload(self, block: KVCacheBlock) -> None:
        """As `LowerTiers.offload`."""
        if block.key is None:
            return
        unread = self._fetches.pop(block.block_id, None)
        if unread is not None:  # its sequence has gone again before the step
            self.host.unpin(unread)
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
        """As `LowerTiers.find`."""
        block = self.host.find(key, token_ids)
        if block is None and self.disk is not None and key in self.disk:
            return DiskBlock(key, token_ids)
        return block

    def find_here(self, key: BlockKey, token_ids: tuple[int, ...]) -> HostBlock | None:
        """As `LowerTiers.find_here`."""
        block = self.host.find(key, token_ids)
        return block if block is not None and block.is_here else None

    def await_blocks(
        self, seq_id: int, account: str, blocks: list[TierBlock], num_tokens: int
    ) -> bool:
        """As `LowerTiers.await_blocks`."""
        on_disk = [block for block in blocks if isinstance(block, DiskBlock)]
        wait = self._waits.get(seq_id)
        if wait is None:
            too_many = len(on_disk) > self.host.num_slots // 2
            if too_many or (on_disk and not self.costs.is_worth_reading(len(on_disk), num_tokens)):
                return False
            wait = _Wait(self._clock() + self.costs.max_wait_s(num_tokens), set())
            self._waits[seq_id] = wait
        if self._clock() >= wait.deadline:
            return False
        wait.keys = {block.key for block in on_disk}
        self._start_read([b for b in on_disk if b.key not in self._reading], account)
        return True

    def is_awaiting(self, seq_id: int) -> bool:
        """As `LowerTiers.is_awaiting`."""
        wait = self._waits.get(seq_id)
        return (
            wait is not None
            and self._clock() < wait.deadline
            and not wait.keys.isdisjoint(self._reading)
            and not any(read.done.done() for read in self._reads)
        )

    def forget(self, seq_id: int) -> None:
        """As `LowerTiers.forget`."""
        self._waits.pop(seq_id, None)

    def pin(self, block: TierBlock) -> None:
        """As `LowerTiers.pin`."""
        self.host.pin(_here(block))

    def fetch(self, block: TierBlock, block_id: int) -> None:
        """As `LowerTiers.fetch`."""
        self._fetches[block_id] = _here(block)

    def take_moves(self) -> BlockMoves:
        """As `LowerTiers.take_moves`."""
        moves = BlockMoves(
            tuple((block_id, block.slot) for block_id, block in self._offloads.items()),
            tuple((block.slot, block_id) for block_id, block in self._fetches.items()),
        )
        self._leaving += self._offloads.values()
        self._coming += self._fetches.values()
        for block in self._offloads.values():
            self._metering.note_offload(block.account, bytes_out=self._block_bytes)
        for block in self._fetches.values():
            self._metering.note_offload(block.account, bytes_in=self._block_bytes)
        self._num_out += len(moves.offloads)
        self._num_in += len(moves.fetches)
        self._offloads, self._fetches = {}, {}
        return moves

    def bytes_by_account(self) -> dict[str, int]:
        """As `LowerTiers.bytes_by_account`."""
        usage = {account: n * self._block_bytes for account, n in self.host.usage.items()}
        on_disk = self.disk.usage if self.disk is not None else {}
        return {a: usage.get(a, 0) + on_disk.get(a, 0) for a in {**usage, **on_disk}}

    def stats(self) -> OffloadStats:
        """As `LowerTiers.stats`."""
        disk = self.disk
        return OffloadStats(
            host_bytes=len(self.host) * self._block_bytes,
            disk_bytes=disk.num_bytes if disk else 0,
            out_bytes=self._num_out * self._block_bytes,
            in_bytes=self._num_in * self._block_bytes,
            written_bytes=disk.num_written_bytes if disk else 0,
            read_bytes=disk.num_read_bytes if disk else 0,
            host_hits=self._num_in,
            disk_hits=self._num_disk_hits,
            dropped_blocks=self._num_dropped + (disk.num_dropped if disk else 0),
            discarded_blocks=disk.num_discarded if disk else 0,
        )

    def save(self, blocks: Sequence[KVCacheBlock]) -> None:
        """As `LowerTiers.save`."""
        disk = self.disk
        if disk is None or not self.costs.is_worth_writing():
            return
        self.begin_step()
        end, room = self._clock() + SAVE_SECONDS, disk.max_blocks
        for block in blocks:
            if block.key is not None:
                disk.touch(block.key)
        for batch in self._unsaved(disk, blocks):
            for account, record in batch[:room]:
                disk.put(account, record)
            disk.flush()
            room -= len(batch)
            if room <= 0 or self._clock() >= end:
                break

    def close(self) -> None:
        """As `LowerTiers.close`."""
        if self.disk is not None:
            self.disk.close()

    def check_integrity(self) -> None:
        """As `LowerTiers.check_integrity`."""
        self.host.check_integrity()
        if self.disk is not None:
            self.disk.check_integrity()

    def _spill(self, block: HostBlock) -> None:
        """Passes blocks that host memory evicts on to the disk."""
        if self.disk is not None and block.key in self.disk:
            return
        taken = False
        if self.disk is not None and self.costs.is_worth_writing():
            content = self.arena.read(block.slot)
            taken = self.disk.put(block.account, Record(block.key, block.token_ids, content))
        self._num_dropped += not taken

    def _unsaved(
        self, disk: DiskTier, blocks: Sequence[KVCacheBlock]
    ) -> Iterator[list[tuple[str, Record]]]:
        """Returns the blocks that the disk lacks, with their accounts: of the device, then of host
        memory."""
        size = max(1, SAVE_BYTES // self._block_bytes)
        on_device = [(b, b.key) for b in blocks if b.key is not None and b.key not in disk]
        for start in range(0, len(on_device), size):
            some = on_device[start : start + size]
            contents = self.transfers.read([block.block_id for block, _ in some])
            yield [
                (block.account, Record(key, block.token_ids, content))
                for (block, key), content in zip(some, contents, strict=True)
            ]
        on_host = [block for block in self.host.newest_first() if block.key not in disk]
        for start in range(0, len(on_host), size):
            yield [
                (block.account, Record(block.key, block.token_ids, self.arena.read(block.slot)))
                for block in on_host[start : start + size]
            ]

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
            self.arena.write(reserved.slot, record.content)
            self.host.arrive(reserved)
            self._num_disk_hits += 1


def _here(block: TierBlock) -> HostBlock:
    if not isinstance(block, HostBlock) or not block.is_here:
        raise RuntimeError("a block that is not in host memory cannot be fetched")
    return block
