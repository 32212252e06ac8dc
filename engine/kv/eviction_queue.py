"""IdleBlocks: free blocks that still hold a prefix, by the account that pays. Torch-free."""

from collections import defaultdict

from loraplex.adapters.residency.eviction import EvictionOrder
from loraplex.engine.kv.budgets import Account


class IdleBlocks:
    """Finds the next block to evict in O(log n): an account's own, or any account's above its
    floor.

    Each account's blocks have an eviction order of their own, and the accounts over their floors
    one more by their lowest scores, so that blocks protected by a floor are never looked at.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, EvictionOrder[int]] = defaultdict(EvictionOrder)
        self._lowest: EvictionOrder[str] = EvictionOrder()

    def put(self, account: Account, block_id: int, score: float) -> None:
        self._blocks[account.name].put(block_id, score)
        self.refresh(account)

    def discard(self, account: Account, block_id: int) -> None:
        self._blocks[account.name].discard(block_id)
        self.refresh(account)

    def refresh(self, account: Account) -> None:
        """Updates the orders after a change of an account's blocks or floor."""
        lowest = self._blocks[account.name].lowest()
        if lowest is None or not account.is_over_floor:
            self._lowest.discard(account.name)
        else:
            self._lowest.put(account.name, lowest[0])

    def lowest_of(self, account: Account) -> int | None:
        """Returns the account's own block of the lowest score."""
        lowest = self._blocks[account.name].lowest()
        return None if lowest is None else lowest[1]

    def lowest(self) -> int | None:
        """Returns the block of the lowest score among all accounts that are over their floors."""
        account = self._lowest.lowest()
        if account is None:
            return None
        lowest = self._blocks[account[1]].lowest()
        return None if lowest is None else lowest[1]

    def holds(self, account: str, block_id: int) -> bool:
        return account in self._blocks and block_id in self._blocks[account]
