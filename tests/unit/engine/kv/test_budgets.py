"""Floors are kept, ceilings are kept, and what is refused is refused with its numbers."""

import pytest
from support.clocks import FakeClock

from loraplex.adapters.residency.eviction import CostAwareEviction
from loraplex.engine.kv.block_pool import BlockPool
from loraplex.engine.kv.budgets import OPERATOR, Budgets
from loraplex.engine.kv.metering import EvictionCause
from loraplex.engine.kv.recompute_cost import cost_per_token
from loraplex.engine.protocol import TenantShare


def pool_of(num_blocks: int, *shares: TenantShare) -> BlockPool:
    pool = BlockPool(num_blocks + 1)
    assert pool.set_shares(shares) == []
    return pool


def cache(pool: BlockPool, account: str, count: int) -> None:
    """Leaves `count` cached blocks of an account."""
    blocks = [pool.allocate(account) for _ in range(count)]
    for block in blocks:
        pool.index(block, 0, f"{account} {block.block_id}".encode(), (block.block_id,))
    pool.release(blocks)


def compute(pool: BlockPool, account: str, content: str) -> None:
    """Uses a cached block of this content, or makes one."""
    block = pool.find(0, content.encode(), (1,))
    if block is None:
        block = pool.allocate(account)
        pool.index(block, 0, content.encode(), (1,))
    else:
        pool.retain(block)
    pool.release([block])


def cached(pool: BlockPool, account: str) -> int:
    return pool.budgets.of(account).cached


def test_a_tenant_without_a_share_can_have_all() -> None:
    assert pool_of(10).num_available("anyone") == 10


def test_nobody_gets_the_unused_floor_of_another() -> None:
    pool = pool_of(10, TenantShare("quiet", floor=4))

    assert (pool.num_available("busy"), pool.num_available("quiet")) == (6, 10)


def test_what_a_tenant_holds_of_its_floor_is_not_reserved_twice() -> None:
    pool = pool_of(10, TenantShare("quiet", floor=4))
    pool.allocate("quiet")

    assert pool.num_available("busy") == 6


def test_a_floor_is_there_however_much_others_took() -> None:
    pool = pool_of(10, TenantShare("quiet", floor=4))
    for _ in range(6):
        pool.allocate("busy")

    with pytest.raises(MemoryError):
        pool.allocate("busy")
    assert pool.num_available("quiet") == 4


def test_nobody_holds_more_than_its_ceiling() -> None:
    pool = pool_of(10, TenantShare("capped", ceiling=2))
    for _ in range(2):
        pool.allocate("capped")

    assert (pool.num_available("capped"), pool.num_available("other")) == (0, 8)


def test_cached_blocks_count_towards_the_ceiling_and_leave_first() -> None:
    pool = pool_of(10, TenantShare("capped", ceiling=2))
    cache(pool, "capped", 2)

    pool.allocate("capped")

    assert pool.budgets.of("capped").charged == 2
    assert pool.metering.of("capped").evictions == {EvictionCause.CEILING: 1}


def test_cached_blocks_may_lie_in_the_unused_floor_of_another_until_it_comes_back() -> None:
    pool = pool_of(10, TenantShare("quiet", floor=4))
    for _ in range(2):
        cache(pool, "busy", 5)
    before = cached(pool, "busy")

    for _ in range(4):
        pool.allocate("quiet")

    assert (before, cached(pool, "busy")) == (10, 6)
    assert pool.metering.of("busy").evictions == {EvictionCause.CLAW_BACK: 4}


def test_a_floor_protects_cached_blocks_from_a_flood() -> None:
    pool = pool_of(10, TenantShare("quiet", floor=4))
    cache(pool, "quiet", 4)
    for _ in range(20):
        cache(pool, "flooder", 6)

    assert cached(pool, "quiet") == 4


def test_without_a_floor_a_flood_takes_all() -> None:
    pool = pool_of(10)
    cache(pool, "quiet", 4)
    for _ in range(20):
        cache(pool, "flooder", 6)

    assert cached(pool, "quiet") == 0


def test_what_comes_again_and_again_gets_to_stay_beside_a_flood_of_what_comes_once() -> None:
    """Also where it had to leave in between, as it did in the first round."""
    clock = FakeClock()
    pool, left = BlockPool(11, CostAwareEviction(clock=clock)), []
    for round_ in range(3):
        for block_id in range(4):
            compute(pool, "regular", f"regular {block_id}")
        for block_id in range(20):
            clock.now += 0.001
            compute(pool, "flooder", f"flood {round_} {block_id}")
        left.append(cached(pool, "regular"))

    assert left == [0, 4, 4]


def test_of_what_was_used_as_often_the_end_of_the_longer_prompt_stays() -> None:
    pool = BlockPool(3, CostAwareEviction(clock=FakeClock()), restore_cost=cost_per_token)
    for account, num_tokens in (("long", 20_000), ("short", 10)):
        block = pool.allocate(account)
        pool.index(block, 0, account.encode(), (1,))
        pool.release([block], num_tokens=num_tokens)

    pool.allocate("other")

    assert (cached(pool, "long"), cached(pool, "short")) == (1, 0)


def test_a_block_that_leaves_for_somebody_without_a_floor_leaves_for_its_capacity() -> None:
    pool = pool_of(4)
    cache(pool, "busy", 4)

    pool.allocate("other")

    assert pool.metering.of("busy").evictions == {EvictionCause.CAPACITY: 1}


def test_a_tenant_within_its_floor_evicts_its_own_when_nobody_is_over() -> None:
    pool = pool_of(4, TenantShare("a", floor=2), TenantShare("b", floor=2))
    cache(pool, "a", 2)
    cache(pool, "b", 2)

    pool.allocate("a")

    assert (cached(pool, "a"), cached(pool, "b")) == (1, 2)


def test_a_lowered_ceiling_frees_cached_blocks_at_once() -> None:
    pool = pool_of(10)
    cache(pool, "tenant", 6)

    pool.set_shares([TenantShare("tenant", ceiling=2)])

    assert cached(pool, "tenant") == 2


def test_blocks_above_a_lowered_ceiling_are_not_cached_when_they_are_released() -> None:
    pool = pool_of(10)
    blocks = [pool.allocate("tenant") for _ in range(4)]
    for block in blocks:
        pool.index(block, 0, bytes([block.block_id]), (1,))
    pool.set_shares([TenantShare("tenant", ceiling=1)])

    pool.release(blocks)

    assert cached(pool, "tenant") == 1


def test_all_faults_of_a_set_of_shares_are_told_and_nothing_is_changed() -> None:
    pool = pool_of(10, TenantShare("a", floor=3))

    faults = pool.set_shares(
        [
            TenantShare("a", floor=8, ceiling=4),
            TenantShare("b", floor=-1),
            TenantShare("b", weight=0.0),
            TenantShare("c", floor=9),
        ]
    )

    assert faults == [
        "the ceiling of 'a' must be at least its floor of 8, got 4",
        "the floor of 'b' must be at least 0, got -1",
        "the weight of 'b' must be above 0 and finite, got 0.0",
        "'b' is named twice",
        "the floors add up to 17 blocks, base prompts included; there are 10",
    ]
    assert pool.budgets.of("a").floor == 3


def test_the_operator_is_no_tenant() -> None:
    faults = Budgets(10).set_shares([TenantShare(OPERATOR, floor=1)])

    assert faults == [f"{OPERATOR!r} is no tenant"]


def test_floors_leave_room_for_base_prompts() -> None:
    pool = pool_of(10)
    for _ in range(3):
        pool.allocate(OPERATOR)

    faults = pool.set_shares([TenantShare("tenant", floor=8)])

    assert faults == ["the floors add up to 11 blocks, base prompts included; there are 10"]


def test_a_raised_floor_overdraws_the_pool_and_stops_who_is_over() -> None:
    pool = pool_of(10)
    for _ in range(8):
        pool.allocate("busy")

    pool.set_shares([TenantShare("quiet", floor=4)])

    assert (pool.budgets.is_overdrawn, pool.num_available("busy")) == (True, 0)
    assert pool.budgets.over_floor("busy") == 8


def test_the_limit_is_what_neither_floors_nor_base_prompts_nor_the_ceiling_exclude() -> None:
    pool = pool_of(20, TenantShare("a", floor=5), TenantShare("capped", ceiling=7))
    pool.allocate(OPERATOR)

    limits = [pool.budgets.limit(tenant) for tenant in ("a", "capped", "other")]

    assert limits == [19, 7, 14]


def test_another_account_can_take_a_block_over() -> None:
    pool = pool_of(4)
    block = pool.allocate("tenant")

    pool.recharge(block, OPERATOR)

    assert (pool.budgets.of("tenant").held, pool.budgets.of(OPERATOR).held) == (0, 1)
    pool.check_integrity({block.block_id: 1})


def test_retired_content_makes_room_without_being_kept_elsewhere() -> None:
    kept: list[int] = []
    pool = BlockPool(4 + 1, on_evict=lambda block: kept.append(block.block_id))
    cache(pool, "tenant", 2)

    pool.retire(pool.blocks)

    assert (kept, pool.num_cached, pool.num_free) == ([], 0, 4)


def test_who_listens_sees_a_block_before_its_content_is_forgotten() -> None:
    seen: list[tuple[object, ...]] = []
    pool = BlockPool(
        1 + 1, on_evict=lambda block: seen.append((block.key, block.token_ids, block.account))
    )
    cache(pool, "tenant", 1)

    pool.allocate("other")

    assert seen == [((0, b"tenant 1"), (1,), "tenant")]
