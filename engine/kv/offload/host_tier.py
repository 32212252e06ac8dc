"""HostTier: the book of KV blocks in host memory."""

import time
from collections.abc import Callable

from loraplex.engine.kv.offload.fair_lru import FairLRU
from loraplex.engine.kv.tiers import BlockKey, HostBlock


class HostTier:
    """Slots of host memory and the content of each; every operation is O(log n).

    A block whose content is on its way, or that is being read, is not evicted. `FairLRU` chooses
    what is evicted when a slot is needed: a tenant cannot flush the blocks of others.
    """

    def __init__(
        self,
        num_slots: int,
        on_evict: Callable[[HostBlock], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_evict` is called with a block just before its slot is given to another."""
        self.num_slots = num_slots
        self._on_evict = on_evict
        self._free = list(range(num_slots - 1, -1, -1))
        self._blocks: dict[BlockKey, HostBlock] = {}
        self._order: FairLRU[BlockKey] = FairLRU(clock)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def usage(self) -> dict[str, int]:
        """Returns the number of blocks of each account."""
        return self._order.usage

    def find(self, key: BlockKey, token_ids: tuple[int, ...]) -> HostBlock | None:
        """Returns the block with this content, arrived or not; its tokens are compared, too."""
        block = self._blocks.get(key)
        return block if block is not None and block.token_ids == token_ids else None

    def reserve(self, key: BlockKey, token_ids: tuple[int, ...], account: str) -> HostBlock | None:
        """Returns a slot for a new block, pinned until `arrive` or `discard`; None where every slot
        is in use. The block that it replaces is forgotten here."""
        if key in self._blocks:
            return None
        if not self._free:
            victim = self._order.victim(account)
            if victim is None:
                return None
            self._on_evict(self._blocks[victim])
            self.discard(self._blocks[victim])
        block = HostBlock(key, token_ids, account, self._free.pop())
        self._blocks[key] = block
        self._order.add(key, account)
        self._order.pin(key)
        return block

    def arrive(self, block: HostBlock) -> None:
        """Records that a reserved block's content is in its slot."""
        block.is_here = True
        self._order.unpin(block.key)

    def touch(self, block: HostBlock) -> None:
        """Counts a block as used now."""
        self._order.touch(block.key)

    def pin(self, block: HostBlock) -> None:
        """Pins a block in its slot until `unpin`."""
        block.num_pins += 1
        if block.num_pins == 1:
            self._order.pin(block.key)

    def unpin(self, block: HostBlock) -> None:
        block.num_pins -= 1
        if block.num_pins == 0:
            self._order.unpin(block.key)

    def newest_first(self) -> list[HostBlock]:
        """Returns all blocks that are here and not being read, newest first."""
        return [self._blocks[key] for key in self._order.newest_first()]

    def discard(self, block: HostBlock) -> None:
        """Forgets a block that is not pinned."""
        del self._blocks[block.key]
        self._order.discard(block.key)
        self._free.append(block.slot)

    def check_integrity(self) -> None:
        """Proves that as many slots are used as there are blocks, in the time of the accounts.

        Raises:
            RuntimeError: the books do not balance.
        """
        if len(self._blocks) + len(self._free) != self.num_slots:
            raise RuntimeError("a slot of the host tier is both free and used, or neither")
        if not len(self._order) == sum(self._order.usage.values()) == len(self._blocks):
            raise RuntimeError("the host tier's order and its blocks differ")
