"""LowerTiers: what the KV manager needs of the tiers below the device's blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from loraplex.engine.kv.block_pool import KVCacheBlock
from loraplex.engine.protocol import OffloadStats
from loraplex.engine.step import NO_MOVES, BlockMoves

BlockKey = tuple[int, bytes]  # (KV group, content key), as in the block pool


@dataclass(eq=False, slots=True)
class HostBlock:
    """A block that has a slot in host memory. Only the tier changes it."""

    key: BlockKey
    token_ids: tuple[int, ...]
    account: str  # that pays for it
    slot: int
    is_here: bool = False  # its content has arrived in the slot
    num_pins: int = 0  # fetches under way


class Transfers(Protocol):
    """Moves blocks between device and host. However many blocks are moved, each storage is gathered
    from once and written to once."""

    def move(self, moves: BlockMoves) -> None:
        """Starts a step's moves, in the order of the device's work. No block id or slot is a target
        twice."""

    def finish(self) -> None:
        """Returns when all offloaded blocks are in their slots."""

    def read(self, block_ids: Sequence[int]) -> list[bytes]:
        """Returns the content of the device's blocks at once."""


class HostSlots(Protocol):
    """Host memory in slots, each as large as a block."""

    @property
    def num_slots(self) -> int: ...

    @property
    def bytes_per_slot(self) -> int: ...

    def read(self, slot: int) -> bytes:
        """Returns a copy of a block, its parts one after another."""

    def write(self, slot: int, content: bytes | memoryview) -> None:
        """Writes what `read` returned."""


@dataclass(frozen=True)
class DiskBlock:
    """A block that is on disk only."""

    key: BlockKey
    token_ids: tuple[int, ...]


TierBlock = HostBlock | DiskBlock


class LowerTiers:
    """No tiers: evicted content is lost. Real tiers override every method."""

    def begin_step(self) -> None:
        """Applies what the last step's copies and the disk have delivered."""

    def offload(self, block: KVCacheBlock) -> None:
        """Offloads a block of the pool that is about to be overwritten, if that is worth it."""

    def find(self, key: BlockKey, token_ids: tuple[int, ...]) -> TierBlock | None:
        """Returns the block with this content in any tier, even if it is still on its way."""
        return None

    def find_here(self, key: BlockKey, token_ids: tuple[int, ...]) -> HostBlock | None:
        """Returns the block with this content, if it can be fetched in this step."""
        return None

    def await_blocks(
        self, seq_id: int, account: str, blocks: list[TierBlock], num_tokens: int
    ) -> bool:
        """Returns whether a sequence should wait for blocks that are elsewhere; if so, they are on
        their way now.

        Args:
            account: the one that pays for them.
            num_tokens: what the sequence need not compute if it gets them.
        """
        return False

    def is_awaiting(self, seq_id: int) -> bool:
        """Returns whether a sequence waits for a read that is not done."""
        return False

    def forget(self, seq_id: int) -> None:
        """Ends a sequence's wait."""

    def pin(self, block: TierBlock) -> None:
        """Pins a block that was found here until it is fetched, which must follow at once."""

    def fetch(self, block: TierBlock, block_id: int) -> None:
        """Copies a pinned block to the device in this step."""

    def take_moves(self) -> BlockMoves:
        """Returns what this step moves; the caller moves it once."""
        return NO_MOVES

    def bytes_by_account(self) -> dict[str, int]:
        """Returns the bytes of each account in all lower tiers."""
        return {}

    def stats(self) -> OffloadStats:
        return OffloadStats()

    def save(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Saves what only memory holds to where it outlives the engine, first the content of these
        device blocks, in order: as much as can be done in seconds. No step may be under way."""

    def close(self) -> None:
        """Closes the disk; no method may be called afterwards."""

    def check_integrity(self) -> None:
        """Proves the books of every tier.

        Raises:
            RuntimeError: naming what is wrong.
        """
