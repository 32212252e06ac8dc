"""BlockPool: who holds which KV block, and what a free block still remembers."""

from collections import OrderedDict
from collections.abc import Iterable

NULL_BLOCK_ID = 0


class KVCacheBlock:
    """One fixed-size block of KV memory. Only the pool changes it."""

    __slots__ = ("block_id", "key", "ref_count", "token_ids")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: tuple[int, bytes] | None = None  # (KV group, content key) while it is indexed
        self.token_ids: tuple[int, ...] = ()  # its tokens while it is indexed


class BlockPool:
    """A closed book of blocks: every operation is O(1), and allocate and release balance.

    A free block keeps its content, and its place in the prefix index, until it is handed out again;
    so the free list, in the order of last use, doubles as the prefix cache. Block 0 is the null
    block: it stands in block tables where a sliding window has passed, and is never handed out.
    """

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` counts the null block, which the caller has memory for too."""
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK_ID]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._index: dict[tuple[int, bytes], KVCacheBlock] = {}

    @property
    def num_blocks(self) -> int:
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Free blocks that a prefix can still be served from."""
        return sum(1 for block in self._index.values() if block.ref_count == 0)

    def allocate(self) -> KVCacheBlock:
        """Hands out the block that was unused the longest; what it remembered is forgotten.

        Raises:
            MemoryError: when no block is free; callers ask `num_free` first.
        """
        if not self._free:
            raise MemoryError("no free KV block")
        block_id, _ = self._free.popitem(last=False)
        block = self.blocks[block_id]
        self._forget(block)
        block.ref_count = 1
        return block

    def share(self, block: KVCacheBlock) -> None:
        """Adds a holder, taking the block off the free list if it was there."""
        if block.ref_count == 0:
            del self._free[block.block_id]
        block.ref_count += 1

    def release(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drops one holder of each block; give the ones to be reused first, first."""
        for block in blocks:
            if block is self.null_block:
                continue
            if block.ref_count == 0:
                raise RuntimeError(f"block {block.block_id} was released more often than held")
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block.block_id] = None
                if block.key is None:  # nothing to remember: first to be handed out
                    self._free.move_to_end(block.block_id, last=False)

    def find(self, group: int, key: bytes, token_ids: tuple[int, ...]) -> KVCacheBlock | None:
        """The block with this content, if any. The tokens are compared too, so that not even
        a collision of keys could serve another prefix."""
        block = self._index.get((group, key))
        return block if block is not None and block.token_ids == token_ids else None

    def remember(
        self, block: KVCacheBlock, group: int, key: bytes, token_ids: tuple[int, ...]
    ) -> None:
        """Indexes a full, computed block, unless its content is in the index already."""
        if block.key is None and (group, key) not in self._index:
            block.key = (group, key)
            block.token_ids = token_ids
            self._index[block.key] = block

    def _forget(self, block: KVCacheBlock) -> None:
        if block.key is not None:
            del self._index[block.key]
            block.key = None
            block.token_ids = ()

    def check_integrity(self, holders: dict[int, int] | None = None) -> None:
        """Proves the books: free + held == all, and every index entry is true.

        Args:
            holders: block id -> how many tables hold it, to be compared with the reference counts.

        Raises:
            RuntimeError: naming the first block that is wrong.
        """
        for block in self.blocks[1:]:
            if (block.ref_count == 0) != (block.block_id in self._free):
                raise RuntimeError(f"block {block.block_id} is both free and held, or neither")
            if holders is not None and block.ref_count != holders.get(block.block_id, 0):
                raise RuntimeError(
                    f"block {block.block_id} has {block.ref_count} references "
                    f"but {holders.get(block.block_id, 0)} holders"
                )
            if block.key is not None and self._index.get(block.key) is not block:
                raise RuntimeError(f"block {block.block_id} believes to be indexed and is not")
        if self.null_block.ref_count or NULL_BLOCK_ID in self._free:
            raise RuntimeError("the null block was handed out")
        if any(block.key != key for key, block in self._index.items()):
            raise RuntimeError("the prefix index points to a block with other content")
