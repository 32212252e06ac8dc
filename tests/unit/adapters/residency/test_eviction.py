"""Which idle thing leaves first, by recency or by what its return would cost."""

from hypothesis import given
from hypothesis import strategies as st
from support.clocks import FakeClock

from loraplex.adapters.residency.eviction import (
    UNUSED,
    CostAwareEviction,
    EvictionOrder,
    LRUEviction,
    PastScores,
)


def test_the_key_of_the_lowest_rank_is_first() -> None:
    ranked: EvictionOrder[str] = EvictionOrder()
    for key, score in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        ranked.put(key, score)
    ranked.discard("b")

    assert ranked.lowest() == (2.0, "c")


def test_equal_ranks_leave_in_the_order_in_which_they_came() -> None:
    ranked: EvictionOrder[str] = EvictionOrder()
    for key in "bac":
        ranked.put(key, 1.0)

    assert ranked.lowest() == (1.0, "b")


def test_a_hot_key_leaves_no_garbage_behind() -> None:
    ranked: EvictionOrder[int] = EvictionOrder()
    ranked.put(0, -1.0)
    for score in range(10_000):
        ranked.put(1, float(score))

    assert len(ranked._heap) < 200


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.floats(-10, 10)), max_size=60))
def test_it_agrees_with_sorting(changes: list[tuple[int, float | None]]) -> None:
    ranked: EvictionOrder[int] = EvictionOrder()
    model: dict[int, float] = {}
    for key, score in changes:
        if score is None:
            ranked.discard(key)
            model.pop(key, None)
        else:
            ranked.put(key, score)
            model[key] = score

    lowest = ranked.lowest()
    assert (lowest and lowest[0]) == min(model.values(), default=None)
    assert {key for key in range(6) if key in ranked} == model.keys()


def test_lru_forgets_how_often_and_how_dear() -> None:
    policy = LRUEviction()
    dear = policy.score(policy.score(UNUSED, 100.0), 100.0)

    assert policy.score(UNUSED, 1.0) > dear


def test_what_is_used_often_outlives_what_was_used_once_just_now() -> None:
    clock = FakeClock()
    policy = CostAwareEviction(half_life=10.0, clock=clock)
    often = UNUSED
    for _ in range(4):
        often = policy.score(often, 1.0)
    clock.now += 10.0

    assert often > policy.score(UNUSED, 1.0)


def test_a_use_counts_half_after_every_half_life() -> None:
    clock = FakeClock()
    policy = CostAwareEviction(half_life=10.0, clock=clock)
    four_uses = UNUSED
    for _ in range(4):
        four_uses = policy.score(four_uses, 1.0)
    clock.now += 20.0

    assert abs(policy.score(UNUSED, 1.0) - four_uses) < 1e-9


def test_what_is_dear_to_get_back_outlives_what_is_cheap() -> None:
    policy = CostAwareEviction(clock=FakeClock())

    assert policy.score(UNUSED, 2.0) > policy.score(UNUSED, 1.0)


@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.floats(1e-6, 1e3), st.booleans()), min_size=1, max_size=30
    )
)
def test_a_prefix_never_ranks_below_what_follows_it(
    uses: list[tuple[float, float, bool]],
) -> None:
    """Each use of the longer chain is one of the prefix, too; the prefix has others besides."""
    clock = FakeClock()
    policy = CostAwareEviction(half_life=10.0, clock=clock)
    prefix = rest = UNUSED
    for pause, cost, is_whole in uses:
        clock.now += pause
        if is_whole:
            rest = policy.score(rest, cost)
        prefix = policy.score(prefix, cost)

    assert prefix >= rest


def test_what_comes_back_has_the_rank_that_it_left_with() -> None:
    past: PastScores[str] = PastScores(2)
    for place, key in enumerate("abc"):
        past.keep(key, float(place))

    assert [past.take(key) for key in "abcc"] == [UNUSED, 1.0, 2.0, UNUSED]
