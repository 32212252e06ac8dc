"""Block-seconds, evictions and waits, by account."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clocks import FakeClock

from loraplex.engine.kv.block_pool import BlockPool
from loraplex.engine.kv.metering import Integral, Metering


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(-5, 5)), max_size=40))
def test_an_integral_is_the_area_under_its_count(changes: list[tuple[float, int]]) -> None:
    integral, now, area, count = Integral(), 0.0, 0.0, 0
    for pause, wanted in changes:
        change = max(-count, wanted)
        area += count * pause
        now += pause
        integral.add(change, now)
        count += change

    assert abs(integral.at(now) - area) <= 1e-6 * (1 + area)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(-5, 5)), max_size=40))
def test_an_integral_never_falls(changes: list[tuple[float, int]]) -> None:
    integral, now, last = Integral(), 0.0, 0.0
    for pause, wanted in changes:
        now += pause
        before = integral.at(now)
        integral.add(max(-integral.count, wanted), now)

        assert last <= before <= integral.at(now)
        last = integral.at(now)


def test_the_payer_is_charged_and_who_only_looks_on_is_not() -> None:
    clock = FakeClock()
    pool = BlockPool(5, metering=Metering(clock))
    block = pool.allocate("payer")
    clock.now += 1.0
    pool.retain(block, "guest")
    clock.now += 2.0
    pool.release([block], "guest")
    clock.now += 4.0
    pool.release([block], "payer")
    clock.now += 8.0

    payer, guest = pool.metering.of("payer"), pool.metering.of("guest")

    now = clock.now
    assert (payer.private.at(now), payer.shared.at(now), payer.saved.at(now)) == (5.0, 2.0, 0.0)
    assert (guest.private.at(now), guest.shared.at(now), guest.saved.at(now)) == (0.0, 0.0, 2.0)


def test_a_cached_block_is_metered_apart() -> None:
    clock = FakeClock()
    pool = BlockPool(5, metering=Metering(clock))
    block = pool.allocate("tenant")
    pool.index(block, 0, b"key", (1,))
    pool.release([block])
    clock.now += 3.0

    meter = pool.metering.of("tenant")

    assert (meter.private.at(clock.now), meter.cached.at(clock.now)) == (0.0, 3.0)


def test_a_shared_block_that_changes_its_payer_is_metered_for_the_new_one() -> None:
    clock = FakeClock()
    pool = BlockPool(5, metering=Metering(clock))
    block = pool.allocate("old")
    pool.retain(block, "guest")
    clock.now += 1.0
    pool.recharge(block, "new")
    clock.now += 2.0

    shared = [pool.metering.of(name).shared.at(clock.now) for name in ("old", "new")]

    assert shared == [1.0, 2.0]


def test_nothing_that_is_metered_ever_falls() -> None:
    """A guest holds what its host pays for; then the host has saved before and now saves less."""
    clock = FakeClock()
    pool = BlockPool(5, metering=Metering(clock))
    meter, readings = pool.metering.of("host"), []
    block, other = pool.allocate("host"), pool.allocate("other")
    steps = [
        lambda: pool.retain(other, "host"),
        lambda: pool.retain(block, "guest"),
        lambda: pool.release([other], "host"),
        lambda: pool.release([block], "host"),
        lambda: pool.recharge(other, "host"),
    ]

    for step in steps:
        step()
        clock.now += 1.1
        counters = (meter.private, meter.shared, meter.saved)
        readings.append([counter.at(clock.now) for counter in counters])

    assert all(column == tuple(sorted(column)) for column in zip(*readings, strict=True))
    assert readings[-1][2] == pytest.approx(2.2)
