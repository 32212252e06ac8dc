"""Which sequences are admitted, wait and are preempted, under ceilings and floors."""

from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.kv import FULL, calls_from_outside
from support.engine.preempting import preempt_all
from support.engine.scheduling import SchedulerHarness, Setup, generate_request

from loraplex.engine.kv.budgets import OPERATOR
from loraplex.engine.protocol import TenantShare
from loraplex.engine.scheduling.preemption import choose_victim
from loraplex.engine.sequence import Sequence, SequenceStatus

BLOCK = 4
NAMES = count()
SMALL = Setup(num_blocks=20, block_size=BLOCK, groups=FULL, max_num_seqs=16)


def harness(*shares: TenantShare, setup: Setup = SMALL) -> SchedulerHarness:
    made = SchedulerHarness(setup)
    assert made.kv.pool.set_shares(shares) == []
    return made


def ask(made: SchedulerHarness, tenant: str, num_blocks: int, max_tokens: int = 4) -> Sequence:
    """A request whose input fills so many blocks, all its own."""
    name = f"{next(NAMES)}"
    prompt = [3] * num_blocks * BLOCK
    request = generate_request(
        name, prompt, tenant=tenant, namespace=name, max_tokens=max_tokens, ignore_eos=True
    )
    return made.add(request)


def is_running(sequence: Sequence) -> bool:
    return sequence.status is SequenceStatus.RUNNING


def test_admission_asks_the_kv_manager_twice_plan_and_commit() -> None:
    made = harness()
    calls = calls_from_outside(made.kv)
    made.scheduler.schedule()
    in_every_step = list(calls)
    sequence = ask(made, "tenant", 4)
    calls.clear()

    made.scheduler.schedule()

    assert is_running(sequence)
    reads_of_the_step = {"block_ids": 1, "first_writable": 1}
    admission = Counter(calls) - Counter(in_every_step) - Counter(reads_of_the_step)
    assert admission == {"plan": 1, "commit": 1}


def test_a_tenant_at_its_ceiling_keeps_only_itself_waiting() -> None:
    made = harness(TenantShare("capped", ceiling=6))
    first, second = ask(made, "capped", 4), ask(made, "capped", 4)
    other = ask(made, "other", 4)

    made.step()

    assert [is_running(s) for s in (first, second, other)] == [True, False, True]


def test_a_sequence_without_room_is_not_overtaken_by_a_smaller_one() -> None:
    made = harness()
    large, larger, small = (ask(made, t, n) for t, n in (("a", 12), ("b", 12), ("c", 2)))

    made.step()

    assert [is_running(s) for s in (large, larger, small)] == [True, False, False]


def test_a_floor_is_not_kept_free_for_a_sequence_that_waits() -> None:
    made = harness(TenantShare("sure", floor=4))
    large, larger, small = (ask(made, t, n) for t, n in (("a", 12), ("b", 12), ("sure", 2)))

    made.step()

    assert [is_running(s) for s in (large, larger, small)] == [True, False, True]


def test_a_tenants_smaller_sequence_does_not_overtake_its_larger_one_within_the_floor() -> None:
    made = harness(TenantShare("sure", floor=4))
    ask(made, "a", 12)
    ask(made, "b", 12)
    larger, smaller = ask(made, "sure", 5), ask(made, "sure", 2)

    made.step()

    assert [is_running(s) for s in (larger, smaller)] == [False, False]


def test_what_exceeds_the_floor_waits_its_turn() -> None:
    made = harness(TenantShare("sure", floor=2))
    ask(made, "a", 12)
    ask(made, "b", 12)
    over = ask(made, "sure", 3)

    made.step()

    assert not is_running(over)


def test_a_raised_floor_is_clawed_back_in_the_round_in_which_it_is_needed() -> None:
    made = harness()
    borrowers = [ask(made, "busy", 6) for _ in range(3)]
    made.step()
    made.kv.pool.set_shares([TenantShare("quiet", floor=8)])
    wanted = ask(made, "quiet", 6)

    output = made.step()

    assert is_running(wanted)
    assert (output.num_preempted, sum(map(is_running, borrowers))) == (2, 1)


def test_claw_back_does_not_wait_until_a_borrower_needs_another_block() -> None:
    made = harness()
    prompt = [3] * (6 * BLOCK - 3)  # room for three tokens more
    borrowers = [
        made.add(generate_request(f"b{i}", prompt, tenant="busy", namespace=f"b{i}"))
        for i in range(3)
    ]
    made.step()
    made.kv.pool.set_shares([TenantShare("quiet", floor=8)])
    wanted = ask(made, "quiet", 6)

    made.step()

    assert is_running(wanted)
    assert sum(map(is_running, borrowers)) == 2


def test_a_raised_floor_takes_nothing_while_nobody_needs_it() -> None:
    made = harness()
    borrowers = [ask(made, "busy", 4) for _ in range(3)]
    made.step()
    made.step()
    made.kv.pool.set_shares([TenantShare("quiet", floor=12)])

    output = made.step()

    assert (output.num_preempted, sum(map(is_running, borrowers))) == (0, 3)


def test_claw_back_takes_from_the_tenant_furthest_over_its_floor() -> None:
    made = harness(TenantShare("within", floor=6))
    safe, far, near = (ask(made, t, n) for t, n in (("within", 5), ("far", 8), ("near", 4)))
    made.step()
    made.kv.pool.set_shares([TenantShare("quiet", floor=6)])
    ask(made, "quiet", 4)

    made.step()

    assert [is_running(s) for s in (safe, far, near)] == [True, False, True]


def test_who_outgrows_the_memory_gives_way_where_most_is_borrowed() -> None:
    made = harness(TenantShare("sure", floor=8))
    sure = ask(made, "sure", 6, max_tokens=8)
    small, large = ask(made, "small", 4, max_tokens=16), ask(made, "large", 7, max_tokens=16)
    for _ in range(30):
        if made.scheduler.num_preemptions:
            break
        made.step()

    assert (sure.num_preemptions, small.num_preemptions, large.num_preemptions) == (0, 0, 1)


@pytest.mark.parametrize(("guaranteed", "gives_way"), [(0, "prompt"), (8, "large")])
def test_a_base_prompt_whose_blocks_are_guaranteed_gives_way_to_nobody(
    guaranteed: int, gives_way: str
) -> None:
    made = harness()
    prompt, small, large = (ask(made, t, n) for t, n in ((OPERATOR, 8), ("a", 3), ("b", 4)))
    made.step()
    made.kv.pool.guarantee_operator(guaranteed)

    victim = choose_victim(small, [large, prompt], made.kv.pool.budgets)

    assert victim is {"prompt": prompt, "large": large}[gives_way]


def test_at_its_ceiling_a_tenant_gives_way_to_itself_though_another_has_borrowed_more() -> None:
    made = harness(TenantShare("capped", ceiling=8))
    capped = [ask(made, "capped", 3, max_tokens=16) for _ in range(2)]
    other = ask(made, "other", 9, max_tokens=12)

    made.run()

    assert other.num_preemptions == 0
    assert sum(s.num_preemptions for s in capped) == 1


def test_a_lowered_ceiling_sends_sequences_back_until_they_fit() -> None:
    made = harness()
    sequences = [ask(made, "tenant", 4, max_tokens=12) for _ in range(3)]
    made.step()
    made.kv.pool.set_shares([TenantShare("tenant", ceiling=8)])

    made.run()

    assert all(sequence.is_finished for sequence in sequences)


def test_a_sequence_that_a_lowered_ceiling_made_impossible_is_named() -> None:
    made = harness()
    sequence = ask(made, "tenant", 6, max_tokens=12)
    made.step()
    made.kv.pool.set_shares([TenantShare("tenant", ceiling=4)])
    for _ in range(6):
        impossible = made.step().impossible

    assert impossible == [sequence]
    assert made.scheduler.admission.refusal(sequence) is not None


def test_a_sequence_that_waits_for_others_to_end_is_not_called_impossible() -> None:
    made = harness(TenantShare("capped", ceiling=6))
    for tenant in ("a", "b", "capped", "capped"):
        ask(made, tenant, 5)

    impossible = [made.step().impossible for _ in range(3)]

    assert impossible == [[], [], []]


def test_a_refusal_has_the_numbers() -> None:
    made = harness(TenantShare("capped", ceiling=5), TenantShare("sure", floor=4))
    sequence = ask(made, "capped", 5)

    assert made.scheduler.admission.refusal(sequence) == (
        "The input of 20 tokens, and one to be generated, takes 6 blocks of 4 tokens; "
        "this tenant can have 5."
    )


@pytest.mark.parametrize(("tenant", "longest"), [("capped", 20), ("sure", 80), ("other", 64)])
def test_a_sequence_ends_where_its_tenants_memory_does(tenant: str, longest: int) -> None:
    made = harness(TenantShare("capped", ceiling=5), TenantShare("sure", floor=4))

    assert made.scheduler.admission.longest(ask(made, tenant, 1)) == longest


def test_choices_that_gave_way_before_they_parted_come_back_to_what_is_cached_of_them() -> None:
    """Both as long as they may be would not fit; the blocks that they find count, too."""
    made = harness(setup=Setup(num_blocks=8, groups=FULL, max_num_batched_tokens=9))
    sequence = made.add(generate_request("r", [3] * 12, n=2, max_tokens=20, ignore_eos=True))
    made.step()
    preempt_all(made.scheduler)

    output = made.scheduler.schedule()

    assert (output.impossible, is_running(sequence)) == ([], True)


@pytest.mark.parametrize(("ceiling", "fits"), [(16, True), (15, False)])
def test_what_passes_behind_a_window_need_not_fit(ceiling: int, fits: bool) -> None:
    """Ten blocks in one group; in the other six, for a window of 6 tokens and a step of 16."""
    made = harness(TenantShare("capped", ceiling=ceiling), setup=Setup(max_num_batched_tokens=16))
    sequence = ask(made, "capped", 9)

    assert (made.scheduler.admission.refusal(sequence) is None) == fits
    if fits:
        made.run()


def test_what_a_window_has_cached_is_no_reason_not_to_fit() -> None:
    """The window's ten blocks are cached, of which it holds six at once; the others are gone."""
    made = harness(setup=Setup(num_blocks=40, max_num_batched_tokens=16))
    request = generate_request("r", [3] * 40, tenant="tenant", max_tokens=1)
    made.add(request)
    made.run()
    pool = made.kv.pool
    pool.retire(block for block in pool.blocks if block.key is not None and block.key[0] == 0)
    assert pool.set_shares([TenantShare("other", floor=40 - 17)]) == []

    sequence = made.add(request)
    output = made.step()

    assert (output.impossible, sequence.num_computed_tokens) == ([], 16)


def test_choices_have_no_part_in_what_their_request_gave_way_before() -> None:
    setup = Setup(num_blocks=12, groups=FULL, max_num_seqs=16, max_num_batched_tokens=16)
    made = harness(TenantShare("a", ceiling=9), setup=setup)
    for tenant, length, n, max_tokens in (("a", 10, 6, 9), ("a", 1, 4, 12), ("b", 18, 6, 11)):
        name = f"{next(NAMES)}"
        options = {"n": n, "max_tokens": max_tokens, "ignore_eos": True, "namespace": name}
        made.add(generate_request(name, [3] * length, tenant=tenant, **options))
    seen: set[Sequence] = set()

    while made.scheduler.running or made.scheduler.waiting:
        made.step()
        seen.update(made.scheduler.running)

    assert max(sequence.num_preemptions for sequence in seen) <= 2


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 40)), min_size=2, max_size=14),
    tenants=st.integers(1, 3),
    has_window=st.booleans(),
)
def test_nobody_is_preempted_more_than_twice(
    lengths: list[tuple[int, int]], tenants: int, has_window: bool
) -> None:
    """However much more is asked for than there is memory."""
    made = harness(setup=Setup(num_blocks=40, max_num_seqs=8) if has_window else SMALL)
    sequences = [
        ask(made, f"{i % tenants}", blocks, max_tokens)
        for i, (blocks, max_tokens) in enumerate(lengths)
    ]

    made.run(max_steps=2000)

    assert max(sequence.num_preemptions for sequence in sequences) <= 2
