"""Block tables grow, slide, fork and copy; nobody sees what another writes."""

import pytest
from support.engine.kv import FULL, FULL_AND_SLIDING, admit, compute, kv_manager, sequence_of
from support.engine.shadow_cache import ShadowCache
from support.instructions import count_lines

from loraplex.engine.kv.storage.groups import KVGroup
from loraplex.engine.kv.storage.layer_state import SlidingWindow

BLOCK = 4


def test_blocks_are_taken_as_tokens_come() -> None:
    kv = kv_manager(8)
    sequence = sequence_of([1] * 5)
    admit(kv, sequence)

    compute(kv, sequence, 3)
    held_after_three = kv.num_held_blocks(sequence)
    compute(kv, sequence)

    assert (held_after_three, kv.num_held_blocks(sequence)) == (1, 2)


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    kv = kv_manager(2)
    sequence = sequence_of([1] * 9)
    admit(kv, sequence)

    assert not kv.allocate_slots(sequence, 9)

    assert (kv.num_held_blocks(sequence), kv.pool.num_free) == (0, 2)


def test_freeing_twice_or_a_sequence_without_a_table_changes_nothing() -> None:
    kv = kv_manager(2)
    sequence = sequence_of([1] * 5)
    kv.free(sequence)
    admit(kv, sequence)
    compute(kv, sequence)

    kv.free(sequence)
    kv.free(sequence)

    kv.check_integrity()
    assert kv.pool.num_free == 2


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
def test_blocks_behind_the_window_go_and_those_in_it_stay(window: int) -> None:
    kv = kv_manager(20, BLOCK, [KVGroup((0,), SlidingWindow(window))])
    sequence = sequence_of([1])
    admit(kv, sequence)

    for _ in range(40):
        compute(kv, sequence)
        sequence.token_ids.append(1)
        position = sequence.num_computed_tokens
        compute(kv, sequence, 0)
        first_visible = max(0, position - window + 1)
        held = [i for i, block in enumerate(kv.block_ids(sequence)[0]) if block]
        assert held == list(range(first_visible // BLOCK, -(-position // BLOCK)))


def test_full_attention_keeps_what_a_sliding_window_lets_go() -> None:
    kv = kv_manager(40, BLOCK, FULL_AND_SLIDING)
    sequence = sequence_of([1] * 32)
    admit(kv, sequence)

    for _ in range(8):
        compute(kv, sequence, 4)
    compute(kv, sequence, 0)

    held = (kv.block_ids(sequence) > 0).sum(axis=1).tolist()
    assert held == [8, 1, 2]


@pytest.mark.parametrize("prompt_length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 2])
@pytest.mark.parametrize("groups", [FULL, FULL_AND_SLIDING], ids=["full", "sliding"])
def test_forked_children_diverge_without_touching_each_other(
    groups: list[KVGroup], prompt_length: int
) -> None:
    kv = kv_manager(60, BLOCK, groups)
    shadow = ShadowCache(kv)
    parent = sequence_of(list(range(1, prompt_length + 1)))
    admit(kv, parent)
    assert kv.allocate_slots(parent, prompt_length)
    shadow.write(parent, prompt_length)
    parent.num_computed_tokens = prompt_length
    family = [parent, parent.fork(1), parent.fork(2)]
    for child in family[1:]:
        kv.fork(parent, child)

    for step in range(BLOCK + 2):
        for sequence in family:
            sequence.token_ids.append(100 * sequence.index + step)
            assert kv.allocate_slots(sequence, 1)
            shadow.write(sequence, 1)
            sequence.num_computed_tokens += 1
            kv.index_computed(sequence)
        for sequence in family:
            shadow.check(sequence)
    kv.check_integrity()


def test_the_last_of_a_family_writes_in_place() -> None:
    kv = kv_manager(10)
    parent = sequence_of([1] * 6)
    admit(kv, parent)
    compute(kv, parent)
    child = parent.fork(1)
    kv.fork(parent, child)
    shared = int(kv.block_ids(parent)[0, 1])

    for sequence in (parent, child):
        sequence.token_ids.append(2)
        compute(kv, sequence)

    copies = kv.take_copies()
    assert [copy.source for copy in copies] == [shared]
    assert kv.block_ids(parent)[0, 1] == copies[0].target
    assert kv.block_ids(child)[0, 1] == shared


def test_a_fork_at_the_end_of_a_block_copies_nothing() -> None:
    kv = kv_manager(10)
    parent = sequence_of([1] * BLOCK)
    admit(kv, parent)
    compute(kv, parent)
    child = parent.fork(1)
    kv.fork(parent, child)

    for sequence in (parent, child):
        sequence.token_ids.append(2)
        compute(kv, sequence)

    assert kv.take_copies() == []
    assert kv.num_held_blocks(parent) == kv.num_held_blocks(child) == 2


def test_a_copy_needs_a_free_block_and_waits_for_one() -> None:
    kv = kv_manager(3)
    parent, other = sequence_of([1] * 6), sequence_of([9])
    admit(kv, parent)
    compute(kv, parent)
    child = parent.fork(1)
    kv.fork(parent, child)
    admit(kv, other)
    compute(kv, other)
    parent.token_ids.append(2)

    refused = kv.allocate_slots(parent, 1)
    kv.free(other)

    assert (refused, kv.allocate_slots(parent, 1)) == (False, True)


def test_aborting_one_child_leaves_the_others_their_blocks() -> None:
    kv = kv_manager(20, BLOCK, FULL_AND_SLIDING)
    shadow = ShadowCache(kv)
    parent = sequence_of(list(range(6)))
    admit(kv, parent)
    assert kv.allocate_slots(parent, 6)
    shadow.write(parent, 6)
    parent.num_computed_tokens = 6
    child = parent.fork(1)
    kv.fork(parent, child)
    before = [shadow.block(int(block)) for block in kv.block_ids(child)[:, 1]]
    parent.token_ids.append(7)
    assert kv.allocate_slots(parent, 1)
    shadow.write(parent, 1)

    kv.free(parent)

    assert [shadow.block(int(block)) for block in kv.block_ids(child)[:, 1]] == before
    shadow.check(child)
    kv.check_integrity()


def test_copies_are_handed_over_once() -> None:
    kv = kv_manager(10)
    parent = sequence_of([1] * 2)
    admit(kv, parent)
    compute(kv, parent)
    child = parent.fork(1)
    kv.fork(parent, child)
    parent.token_ids.append(2)
    compute(kv, parent)

    assert (len(kv.take_copies()), len(kv.take_copies()), kv.num_copied_blocks) == (1, 0, 1)


def test_a_shared_block_counts_once_in_the_slots() -> None:
    kv = kv_manager(10)
    parent = sequence_of([1] * 6)
    admit(kv, parent)
    compute(kv, parent)
    kv.fork(parent, parent.fork(1))

    assert kv.slots() == (2 * BLOCK, 6)


def test_the_audit_finds_a_reference_that_no_table_holds() -> None:
    kv = kv_manager(4)
    kv.pool.allocate("tenant")

    with pytest.raises(RuntimeError, match="1 references but 0 holders"):
        kv.check_integrity()


def test_the_audit_finds_a_device_mirror_that_differs() -> None:
    kv = kv_manager(4)
    sequence = sequence_of([1] * 5)
    admit(kv, sequence)
    compute(kv, sequence)
    kv.block_ids(sequence)[0, 1] += 1

    with pytest.raises(RuntimeError, match="mirror differs"):
        kv.check_integrity()


def test_slots_are_counted_at_one_cost_however_long_the_sequences() -> None:
    costs = []
    for length in (20, 120):
        kv = kv_manager(100, groups=FULL_AND_SLIDING)
        sequence = sequence_of([1] * length)
        admit(kv, sequence)
        compute(kv, sequence)
        costs.append(count_lines(kv.slots))

    assert costs[0] == costs[1]
