"""BlockMap: every KV block's owner, state and reference count, small enough to be drawn often."""

from collections import Counter

import msgspec

from loraplex.engine.kv.block_pool import NOBODY, BlockPool, KVCacheBlock
from loraplex.engine.kv.budgets import OPERATOR
from loraplex.engine.protocol import BlockMap, BlockRun, BlockState

LIMIT_BYTES = 4096  # of an encoded map
LIMIT_BLOCKS = 10_000  # for every so many blocks, begun ones included

Counts = Counter[tuple[str, BlockState, int]]  # blocks by owner, state and reference count


def block_map(pool: BlockPool, request_id: str) -> BlockMap:
    """Counts the pool's blocks in runs, sorted by owner, state and reference count.

    A block's number says only where it lies, so blocks that are alike form one run wherever they
    lie, and nothing is lost by it. Where that is more than 4 kB per 10,000 blocks, reference counts
    are first rounded down to powers of two, then the owners of the fewest blocks are merged into
    one without a name.
    """
    counts = _count(pool)
    limit = LIMIT_BYTES * -(-len(pool.blocks) // LIMIT_BLOCKS)
    exact = _encode(counts, request_id, is_rounded=False)
    if _size(exact) <= limit:
        return exact
    counts = _rounded(counts)
    num_owners = len({owner for owner, _, _ in counts})
    while True:
        rounded = _encode(_named(counts, num_owners), request_id, is_rounded=True)
        if _size(rounded) <= limit or num_owners == 0:
            return rounded
        num_owners //= 2


def _count(pool: BlockPool) -> Counts:
    """Counts held blocks only: the pool counts the others, of which there may be very many."""
    counts = Counter(_describe(block) for block in pool.blocks if block.ref_count)
    counts[NOBODY, BlockState.NULL, 0] = 1
    counts[NOBODY, BlockState.BLANK, 0] = pool.num_free - pool.num_cached
    for account in pool.budgets.accounts:
        counts[account.name, BlockState.CACHED, 0] = account.cached
    return +counts


def _describe(block: KVCacheBlock) -> tuple[str, BlockState, int]:
    if block.account == OPERATOR:
        state = BlockState.BASE_PROMPT
    else:
        state = BlockState.HELD if block.ref_count == 1 else BlockState.SHARED
    return block.account, state, block.ref_count


def _rounded(counts: Counts) -> Counts:
    rounded: Counts = Counter()
    for (owner, state, references), count in counts.items():
        rounded[owner, state, 1 << references.bit_length() >> 1] += count
    return rounded


def _named(counts: Counts, num_owners: int) -> Counts:
    """Keeps the names of the owners of the most blocks."""
    sizes: Counter[str] = Counter()
    for (owner, _, _), count in counts.items():
        sizes[owner] += count
    largest = {owner for owner, _ in sizes.most_common(num_owners)}
    named: Counts = Counter()
    for (owner, state, references), count in counts.items():
        named[owner if owner in largest else NOBODY, state, references] += count
    return named


def _encode(counts: Counts, request_id: str, *, is_rounded: bool) -> BlockMap:
    owners = sorted({owner for owner, _, _ in counts})
    places = {owner: place for place, owner in enumerate(owners)}
    return BlockMap(
        request_id=request_id,
        owners=owners,
        runs=[
            BlockRun(places[owner], state, references, count)
            for (owner, state, references), count in sorted(counts.items())
        ],
        is_rounded=is_rounded,
    )


def _size(message: BlockMap) -> int:
    return len(msgspec.msgpack.encode(message))
