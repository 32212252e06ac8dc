"""LowerTiers: what the KV manager asks of the tiers below the device's blocks."""

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
    account: str  # who pays for it
    slot: int
    is_here: bool = False  # its content has arrived in the slot
    num_pins: int = 0  # fetches under way


class Transfers(Protocol):
    """However many blocks are moved, each storage is gathered from once and written to once."""

    def move(self, moves: BlockMoves) -> None:
        """Starts a step's moves, in the order of the device's work. Block ids and slots are each
        but once among the targets."""

    def finish(self) -> None:
        """Returns when all that was offloaded is in its slots."""

    def read(self, block_ids: Sequence[int]) -> list[bytes]:
        """The content of the device's blocks, at once."""


class HostSlots(Protocol):
    """Host memory in slots, each as large as a block."""

    @property
    def num_slots(self) -> int: ...

    @property
    def bytes_per_slot(self) -> int: ...

    def read(self, slot: int) -> bytes:
        """A copy of a block, its parts one after another."""

    def write(self, slot: int, content: bytes | memoryview) -> None:
        """Takes in what `read` gave out."""


@dataclass(frozen=True)
class DiskBlock:
    """A block that is on disk only."""

    key: BlockKey
    token_ids: tuple[int, ...]


TierBlock = HostBlock | DiskBlock


class LowerTiers:
    """There are none: what is evicted is gone. A real one overrides all of this."""

    def begin_step(self) -> None:
        """Takes in what the last step's copies and the disk have brought."""

    def offload(self, block: KVCacheBlock) -> None:
        """Takes in a block of the pool that is about to be overwritten, if that is worth it."""

    def find(self, key: BlockKey, token_ids: tuple[int, ...]) -> TierBlock | None:
        """The block with this content in whatever tier, also if it is only on its way."""
        return None

    def find_here(self, key: BlockKey, token_ids: tuple[int, ...]) -> HostBlock | None:
        """The block with this content, if it can be fetched in this step."""
        return None

    def await_blocks(
        self, seq_id: int, account: str, blocks: list[TierBlock], num_tokens: int
    ) -> bool:
        """Whether a sequence should wait for blocks that are not here; if so, they are on their
        way now.

        Args:
            account: who pays for them.
            num_tokens: what the sequence need not compute if it gets them.
        """
        return False

    def is_awaiting(self, seq_id: int) -> bool:
        """Whether a sequence waits for a read that is not done."""
        return False

    def forget(self, seq_id: int) -> None:
        """A sequence waits no more."""

    def pin(self, block: TierBlock) -> None:
        """Keeps a block that was found here until it is fetched, which must follow at once."""

    def fetch(self, block: TierBlock, block_id: int) -> None:
        """Copies a held block to the device in this step."""

    def take_moves(self) -> BlockMoves:
        """What this step moves; the caller does it, once."""
        return NO_MOVES

    def bytes_by_account(self) -> dict[str, int]:
        """What each account has in all lower tiers."""
        return {}

    def stats(self) -> OffloadStats:
        return OffloadStats()

    def save(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Takes what only memory has, first the content of these blocks of the device, in their
        order, to where it outlives the engine: as much as can be done in seconds. No step may be
        under way."""

    def close(self) -> None:
        """Lets go of the disk; nothing may be asked for afterwards."""

    def check_integrity(self) -> None:
        """Proves the books of every tier.

        Raises:
            RuntimeError: naming what is wrong.
        """
