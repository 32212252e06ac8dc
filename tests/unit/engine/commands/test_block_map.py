"""The map of the pool: true, and never larger than what may be sent."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.commands.block_map import block_map
from loraplex.engine.kv.block_pool import BlockPool
from loraplex.engine.kv.budgets import OPERATOR
from loraplex.engine.protocol import BlockMap, BlockRun, BlockState


def size(found: BlockMap) -> int:
    return len(msgspec.msgpack.encode(found))


def pool_with(accounts: list[str], references: list[int]) -> BlockPool:
    """A pool whose blocks are held by these accounts, so many times each."""
    pool = BlockPool(len(accounts) + 1)
    for account, count in zip(accounts, references, strict=True):
        block = pool.allocate(account)
        block.ref_count = count
    return pool


def test_blocks_that_are_alike_are_one_run_with_owner_state_and_references() -> None:
    pool = BlockPool(9)
    _, shared, cached = (pool.allocate("tenant") for _ in range(3))
    pool.retain(shared)
    pool.index(cached, 0, b"key", (1,))
    pool.release([cached])
    prompt = [pool.allocate(OPERATOR) for _ in range(2)]
    for block in prompt:
        pool.retain(block, "tenant")

    found = block_map(pool, "id")

    assert found.owners == ["", OPERATOR, "tenant"]
    assert found.runs == [
        BlockRun(0, BlockState.BLANK, 0, 3),
        BlockRun(0, BlockState.NULL, 0, 1),
        BlockRun(1, BlockState.BASE_PROMPT, 2, 2),
        BlockRun(2, BlockState.CACHED, 0, 1),
        BlockRun(2, BlockState.HELD, 1, 1),
        BlockRun(2, BlockState.SHARED, 2, 1),
    ]
    assert not found.is_rounded


def test_fifty_tenants_in_ten_thousand_blocks_are_told_exactly() -> None:
    accounts = [f"tenant-{i % 50:02}" for i in range(10_000)]
    pool = pool_with(accounts, [1 + (i % 7 == 0) * (i % 3) for i in range(10_000)])

    found = block_map(pool, "id")

    assert (found.is_rounded, sum(run.count for run in found.runs)) == (False, 10_001)
    assert size(found) <= 4096


def test_a_larger_pool_may_have_a_larger_map() -> None:
    pool = pool_with([f"tenant-{i % 300:03}" for i in range(10_500)], [1] * 10_500)

    found = block_map(pool, "id")

    assert 4096 < size(found) <= 2 * 4096
    assert (found.is_rounded, len(found.owners)) == (False, 301)


@given(
    seed=st.integers(0, 2**32),
    num_accounts=st.integers(1, 700),
    max_references=st.sampled_from([1, 3, 100, 10**6]),
    length=st.sampled_from([1, 36, 300]),
)
def test_whatever_the_pool_holds_the_map_stays_small_and_counts_every_block(
    seed: int, num_accounts: int, max_references: int, length: int
) -> None:
    num_blocks = 700
    scattered = [(seed * 31 + i * 2654435761) % 2**32 for i in range(num_blocks)]
    accounts = [str(value % num_accounts).rjust(length, "t") for value in scattered]
    pool = pool_with(accounts, [1 + value // 7 % max_references for value in scattered])

    found = block_map(pool, "r" * 40)

    assert size(found) <= 4096
    assert sum(run.count for run in found.runs) == num_blocks + 1
