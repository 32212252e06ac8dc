"""BlockPool: the KV blocks that are held, the accounts that pay, and what free ones cache."""

from collections import Counter, deque
from collections.abc import Callable, Iterable

from loraplex.adapters.residency.eviction import UNUSED, EvictionPolicy, LRUEviction, PastScores
from loraplex.engine.kv.budgets import OPERATOR, Account, Budgets
from loraplex.engine.kv.eviction_queue import IdleBlocks
from loraplex.engine.kv.metering import EvictionCause, Metering
from loraplex.engine.protocol import TenantShare

NULL_BLOCK_ID = 0
NOBODY = ""  # pays for blocks that are blank
PAST_PER_BLOCK = 4  # evicted contents whose scores are kept, for each block


class KVCacheBlock:
    """One fixed-size block of KV memory. Only the pool changes it."""

    __slots__ = ("account", "block_id", "eviction_score", "key", "ref_count", "token_ids")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.account = NOBODY  # that pays for it while it is held or cached
        self.key: tuple[int, bytes] | None = None  # (KV group, content key) while it is indexed
        self.token_ids: tuple[int, ...] = ()  # its tokens while it is indexed
        self.eviction_score = UNUSED  # by its content's uses so far; the lowest is evicted first


class BlockPool:
    """A closed book of blocks: allocations and releases balance, and each costs O(log n) at most.

    A block is held, cached (free, but its content can be found until the block is handed out again)
    or blank. Held and cached blocks are charged to the account that allocated them, within its
    `budgets`. Block 0 is the null block: it stands in block tables behind a sliding window and is
    never handed out.
    """

    def __init__(
        self,
        num_blocks: int,
        eviction: EvictionPolicy | None = None,
        metering: Metering | None = None,
        restore_cost: Callable[[int], float] = lambda num_tokens: 1.0,
        on_evict: Callable[[KVCacheBlock], None] = lambda block: None,
    ) -> None:
        """
        Args:
            num_blocks: with the null block, which the caller has memory for too.
            eviction: scores cached blocks; None: the least recently used leaves first.
            restore_cost: what it costs to get a token of a prefix so long back, in any unit.
            on_evict: called with a block whose content may still be useful, before it is forgotten.
        """
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK_ID]
        self.budgets = Budgets(num_blocks - 1)
        self.metering = metering or Metering()
        self._on_evict = on_evict
        self._blank = deque(range(1, num_blocks))
        self._idle = IdleBlocks()
        self._num_cached = 0
        self.num_ever_used = 0  # blocks from the first to the last that was ever handed out
        self._index: dict[tuple[int, bytes], KVCacheBlock] = {}
        self._eviction = eviction or LRUEviction()
        self._past_scores: PastScores[tuple[int, bytes]] = PastScores(PAST_PER_BLOCK * num_blocks)
        self._restore_cost = restore_cost

    @property
    def num_blocks(self) -> int:
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        """Returns the number of blocks that no sequence holds, whichever account may have them."""
        return len(self._blank) + self._num_cached

    @property
    def num_cached(self) -> int:
        """Returns the number of free blocks that still serve a prefix."""
        return self._num_cached

    def findable(self) -> list[KVCacheBlock]:
        """Returns all blocks whose content can be found: those in use, then the cached ones, each
        by score."""
        known = (block for block in self.blocks if block.key is not None)
        return sorted(known, key=lambda block: (block.ref_count == 0, -block.eviction_score))

    def num_available(self, account: str) -> int:
        """Returns how many blocks the account could be given now: blank ones and evictable cached
        ones, within its ceiling and outside the unused floors of others."""
        return self.budgets.num_available(account)

    def allocate(self, account: str) -> KVCacheBlock:
        """Hands out a block, which the account pays for; its cached content is forgotten.

        Cached blocks are evicted in the order of their scores, but never below another account's
        floor.

        Raises:
            MemoryError: when there is none for this account; callers ask `num_available` first.
        """
        payer = self.budgets.of(account)
        if not self.budgets.num_available(account):
            raise MemoryError("no free KV block")
        block = self._take(payer)
        block.ref_count = 1
        block.account = account
        self._charge(payer, held=1)
        self.metering.note_use(account, 1)
        return block

    def retain(self, block: KVCacheBlock, holder: str | None = None) -> None:
        """Adds a holder to a held or cached block: `holder`, or else the account that pays."""
        if block.ref_count == 0:
            payer = self.budgets.of(block.account)
            self._num_cached -= 1
            self._idle.discard(payer, block.block_id)
            self._charge(payer, held=1, cached=-1)
        block.ref_count += 1
        if block.ref_count == 2:
            self.metering.note_shared(block.account, 1)
        self.metering.note_use(block.account if holder is None else holder, 1)

    def release(
        self, blocks: Iterable[KVCacheBlock], holder: str | None = None, num_tokens: int = 1
    ) -> None:
        """Drops one holder of each block; blocks to be reused first come first.

        Args:
            holder: the account that releases; None: the one that pays for the block.
            num_tokens: of the sequence that used the blocks.
        """
        cost = self._restore_cost(num_tokens)
        for block in blocks:
            if block is self.null_block:
                continue
            if block.ref_count == 0:
                raise RuntimeError(f"block {block.block_id} was released more often than held")
            block.ref_count -= 1
            self.metering.note_use(block.account if holder is None else holder, -1)
            if block.key is not None:
                block.eviction_score = self._eviction.score(block.eviction_score, cost)
            if block.ref_count == 1:
                self.metering.note_shared(block.account, -1)
            elif block.ref_count == 0:
                self._set_free(block)

    def find(self, group: int, key: bytes, token_ids: tuple[int, ...]) -> KVCacheBlock | None:
        """Returns the block with this content, or None. The tokens are compared too, so that not
        even a collision of keys could serve another prefix."""
        block = self._index.get((group, key))
        return block if block is not None and block.token_ids == token_ids else None

    def index(
        self, block: KVCacheBlock, group: int, key: bytes, token_ids: tuple[int, ...]
    ) -> None:
        """Indexes a full, computed block, unless the index has its content already."""
        if block.key is None and (group, key) not in self._index:
            block.key = (group, key)
            block.token_ids = token_ids
            block.eviction_score = self._past_scores.take(block.key)
            self._index[block.key] = block

    def set_shares(self, shares: Iterable[TenantShare]) -> list[str]:
        """Sets tenants' floors and ceilings; cached blocks above a ceiling are evicted at once.

        Returns:
            every fault; where there is one, nothing has been changed.
        """
        shares = list(shares)
        faults = self.budgets.set_shares(shares)
        if not faults:
            for share in shares:
                account = self.budgets.of(share.tenant)
                while account.is_over_ceiling and account.cached:
                    self._clear(self._idle.lowest_of(account), EvictionCause.CEILING)
                self._idle.refresh(account)
        return faults

    def guarantee_operator(self, num_blocks: int) -> None:
        """Reserves so many blocks, including those that it holds, for the operator alone."""
        self.budgets.guarantee_operator(num_blocks)
        self._idle.refresh(self.budgets.of(OPERATOR))

    def recharge(self, block: KVCacheBlock, account: str) -> None:
        """Charges a held block to another account from now on."""
        is_shared = block.ref_count > 1
        self.metering.note_shared(block.account, -is_shared)
        self._charge(self.budgets.of(block.account), held=-1)
        block.account = account
        self._charge(self.budgets.of(account), held=1)
        self.metering.note_shared(account, is_shared)

    def retire(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Forgets the content of cached blocks that can never be asked for again."""
        for block in blocks:
            if block.ref_count == 0 and block.key is not None:
                self._clear(block.block_id, EvictionCause.RETIRED)

    def _take(self, payer: Account) -> KVCacheBlock:
        """Returns a blank block, or the cached one that is evicted for this account."""
        if payer.is_at_ceiling:
            return self._evict(self._idle.lowest_of(payer), EvictionCause.CEILING)
        if self._blank:
            block = self.blocks[self._blank.popleft()]
            self.num_ever_used = max(self.num_ever_used, block.block_id)
            return block
        lowest = self._idle.lowest()
        if lowest is None:
            lowest = self._idle.lowest_of(payer)
        is_owed = payer.charged < payer.floor
        cause = EvictionCause.CLAW_BACK if is_owed else EvictionCause.CAPACITY
        return self._evict(lowest, cause)

    def _clear(self, block_id: int | None, cause: EvictionCause) -> None:
        """Evicts a block that no account needs."""
        self._blank.appendleft(self._evict(block_id, cause).block_id)

    def _evict(self, block_id: int | None, cause: EvictionCause) -> KVCacheBlock:
        if block_id is None:
            raise RuntimeError("the budgets promised a block that is not there")
        block = self.blocks[block_id]
        if cause is not EvictionCause.RETIRED:
            self._on_evict(block)
        self.metering.note_eviction(block.account, cause)
        payer = self.budgets.of(block.account)
        self._num_cached -= 1
        self._idle.discard(payer, block_id)
        self._charge(payer, cached=-1)
        self._forget(block)
        return block

    def _set_free(self, block: KVCacheBlock) -> None:
        payer = self.budgets.of(block.account)
        if block.key is None:  # nothing to remember
            self._charge(payer, held=-1)
            block.account = NOBODY
            self._blank.appendleft(block.block_id)
            return
        self._num_cached += 1
        self._charge(payer, held=-1, cached=1)
        self._idle.put(payer, block.block_id, block.eviction_score)
        if payer.is_over_ceiling:
            self._clear(self._idle.lowest_of(payer), EvictionCause.CEILING)

    def _charge(self, payer: Account, *, held: int = 0, cached: int = 0) -> None:
        self.budgets.charge(payer, held, cached)
        self.metering.note_charge(payer.name, held, cached)
        if payer.floor:  # else its cached blocks are above it anyway
            self._idle.refresh(payer)

    def _forget(self, block: KVCacheBlock) -> None:
        if block.key is not None:
            del self._index[block.key]
            self._past_scores.keep(block.key, block.eviction_score)
            block.key = None
            block.token_ids = ()
        block.account = NOBODY
        block.eviction_score = UNUSED

    def check_integrity(self, holders: dict[int, int] | None = None) -> None:
        """Proves the books: free + held == all, every index entry is true, every block is charged.

        Args:
            holders: block id -> how many tables hold it, to be compared with the reference counts.

        Raises:
            RuntimeError: naming the first block that is wrong.
        """
        blank = set(self._blank)
        for block in self.blocks[1:]:
            is_idle = self._idle.holds(block.account, block.block_id)
            if (block.ref_count == 0) != ((block.block_id in blank) or is_idle):
                raise RuntimeError(f"block {block.block_id} is both free and held, or neither")
            if holders is not None and block.ref_count != holders.get(block.block_id, 0):
                raise RuntimeError(
                    f"block {block.block_id} has {block.ref_count} references "
                    f"but {holders.get(block.block_id, 0)} holders"
                )
            if block.key is not None and self._index.get(block.key) is not block:
                raise RuntimeError(f"block {block.block_id} believes to be indexed and is not")
        if self.null_block.ref_count or NULL_BLOCK_ID in blank:
            raise RuntimeError("the null block was handed out")
        if any(block.key != key for key, block in self._index.items()):
            raise RuntimeError("the prefix index points to a block with other content")
        self._check_charges()

    def _check_charges(self) -> None:
        held = Counter(block.account for block in self.blocks if block.ref_count)
        cached = Counter(b.account for b in self.blocks if not b.ref_count and b.key is not None)
        if self._num_cached != cached.total():
            raise RuntimeError("the number of cached blocks is wrong")
        self.budgets.check_integrity(held, cached)
