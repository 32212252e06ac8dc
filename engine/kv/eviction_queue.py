"""IdleBlocks: free blocks that still hold a prefix, by who pays for them. Torch-free."""

from collections import defaultdict

from loraplex.adapters.eviction import RankedSet
from loraplex.engine.kv.budgets import Account


class IdleBlocks:
    """Finds the next block to be evicted in O(log n): one account's, or anyone's over its floor.

    Each account's blocks are in one ranked set, and the lowest rank of each account that is over
    its floor in another; so blocks that a floor protects are never looked at.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, RankedSet[int]] = defaultdict(RankedSet)
        self._lowest: RankedSet[str] = RankedSet()

    def put(self, account: Account, block_id: int, rank: float) -> None:
        self._blocks[account.name].put(block_id, rank)
        self.refresh(account)

    def discard(self, account: Account, block_id: int) -> None:
        self._blocks[account.name].discard(block_id)
        self.refresh(account)

    def refresh(self, account: Account) -> None:
        """To be called when an account's blocks, or its floor, have changed."""
        lowest = self._blocks[account.name].lowest()
        if lowest is None or not account.is_over_floor:
            self._lowest.discard(account.name)
        else:
            self._lowest.put(account.name, lowest[0])

    def lowest_of(self, account: Account) -> int | None:
        """The account's own block of the lowest rank."""
        lowest = self._blocks[account.name].lowest()
        return None if lowest is None else lowest[1]

    def lowest(self) -> int | None:
        """The block of the lowest rank among all accounts that are over their floors."""
        account = self._lowest.lowest()
        if account is None:
            return None
        lowest = self._blocks[account[1]].lowest()
        return None if lowest is None else lowest[1]

    def holds(self, account: str, block_id: int) -> bool:
        return account in self._blocks and block_id in self._blocks[account]
