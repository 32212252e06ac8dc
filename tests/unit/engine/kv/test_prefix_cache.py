"""What is found again in the prefix cache, and what must never be."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from support.engine.kv import FULL, SCOPE, admit, compute, kv_manager, run_through, sequence_of

from loraplex.engine.kv.block_pool import BlockPool
from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.kv.storage.groups import KVGroup
from loraplex.engine.kv.storage.layer_state import FullAttention, SlidingWindow

BLOCK = 4
PROMPT = list(range(1, 14))  # three blocks and a token


def test_the_same_prompt_is_found_again() -> None:
    kv = kv_manager(20)

    assert [run_through(kv, sequence_of(PROMPT)) for _ in range(2)] == [0, 12]


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_whole_blocks_are_found_but_never_the_last_token(length: int, cached: int) -> None:
    kv = kv_manager(20)
    run_through(kv, sequence_of(PROMPT))

    assert run_through(kv, sequence_of(PROMPT[:length])) == cached


def test_a_prompt_is_found_up_to_where_it_differs() -> None:
    kv = kv_manager(20)
    run_through(kv, sequence_of(PROMPT))

    assert run_through(kv, sequence_of([*PROMPT[:6], 99, *PROMPT[7:]])) == 4


def test_equal_tokens_behind_another_beginning_are_not_found() -> None:
    kv = kv_manager(20)
    run_through(kv, sequence_of(PROMPT))

    assert run_through(kv, sequence_of([99, *PROMPT[1:]])) == 0


def test_a_running_sequence_shares_its_prefix_at_once() -> None:
    kv = kv_manager(4)
    first, second = sequence_of(PROMPT), sequence_of(PROMPT)
    admit(kv, first)
    compute(kv, first, 12)

    assert admit(kv, second) == 12
    assert kv.num_held_blocks(second) == 3
    assert kv.pool.num_free == 1


def test_generated_tokens_are_found_in_the_next_turn() -> None:
    kv = kv_manager(20)
    answer = sequence_of(PROMPT[:6])
    admit(kv, answer)
    for token in PROMPT[6:12]:
        compute(kv, answer)
        answer.token_ids.append(token)
    kv.free(answer)

    assert run_through(kv, sequence_of(PROMPT)) == 8


def test_forked_siblings_are_each_found_under_their_own_history() -> None:
    kv = kv_manager(40, block_size=1)
    left = sequence_of([1, 1])
    admit(kv, left)
    compute(kv, left)
    right = left.fork(1)
    kv.fork(left, right)

    for sibling, tokens in ((left, [2, 5, 6]), (right, [3, 5, 6, 7])):
        for token in tokens:
            sibling.token_ids.append(token)
            compute(kv, sibling)
    left.token_ids.append(7)
    compute(kv, left)

    for history, owner in (([1, 1, 2, 5, 6, 7, 0], left), ([1, 1, 3, 5, 6, 7, 0], right)):
        again = sequence_of(history)
        assert admit(kv, again) == 6
        assert kv.block_ids(again)[0, :6].tolist() == kv.block_ids(owner)[0, :6].tolist()


def test_the_beginning_of_a_prefix_outlives_its_end() -> None:
    kv = kv_manager(4)
    run_through(kv, sequence_of(PROMPT[:12]))

    run_through(kv, sequence_of([99] * 5))

    assert run_through(kv, sequence_of(PROMPT)) == 8


def test_prompt_logprobs_need_every_position_computed() -> None:
    kv = kv_manager(20)
    run_through(kv, sequence_of(PROMPT))

    assert run_through(kv, sequence_of(PROMPT, prompt_logprobs=1)) == 0


def test_prompt_logprobs_once_given_need_nothing_any_more() -> None:
    kv = kv_manager(20)
    run_through(kv, sequence_of(PROMPT))
    resumed = sequence_of(PROMPT, prompt_logprobs=1)
    resumed.token_ids.append(7)

    assert run_through(kv, resumed) == 12


IDENTITIES: list[dict[str, Any]] = [
    {"namespace": "x"},
    {"namespace": "y"},
    {"namespace": "x", "adapter": "a"},
    {"namespace": "x", "adapter": "b"},
    {"namespace": "y", "adapter": "a"},
]


@pytest.mark.parametrize(("one", "other"), list(product(IDENTITIES, repeat=2)))
def test_a_prefix_is_shared_only_within_one_namespace_and_adapter(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    kv = kv_manager(20)
    run_through(kv, sequence_of(PROMPT, **one))

    assert run_through(kv, sequence_of(PROMPT, **other)) == (12 if one == other else 0)


def test_an_adapter_replaced_by_another_content_starts_cold_and_finds_its_own_again() -> None:
    kv = kv_manager(40)

    found = [run_through(kv, sequence_of(PROMPT, adapter=a)) for a in ("v1", "v2", "v1", "v2")]

    assert found == [0, 0, 12, 12]


@pytest.mark.parametrize("field", ["kv_format", "model_revision", "quantization", "numerics"])
def test_blocks_of_another_model_format_or_numerics_are_not_found(field: str) -> None:
    other = replace(SCOPE, **{field: "other"})
    old, new = kv_manager(20), kv_manager(20, scope=other)
    run_through(old, sequence_of(PROMPT))
    new.pool = old.pool

    assert run_through(new, sequence_of(PROMPT)) == 0


@pytest.mark.parametrize(
    ("adapter_start", "shared"), [(0, 0), (3, 0), (4, 4), (5, 4), (8, 8), (11, 8), (12, 12)]
)
def test_blocks_wholly_before_an_adapter_acts_are_the_base_models(
    adapter_start: int, shared: int
) -> None:
    base_first, adapter_first = kv_manager(20), kv_manager(20)
    activated: dict[str, Any] = {"adapter": "a", "adapter_start": adapter_start}
    run_through(base_first, sequence_of(PROMPT))
    run_through(adapter_first, sequence_of(PROMPT, **activated))

    assert run_through(base_first, sequence_of(PROMPT, **activated)) == shared
    assert run_through(adapter_first, sequence_of(PROMPT)) == shared


def test_an_activated_adapter_finds_its_own_blocks_behind_its_start() -> None:
    kv = kv_manager(20)
    run_through(kv, sequence_of(PROMPT, adapter="a", adapter_start=6))

    assert run_through(kv, sequence_of(PROMPT, adapter="a", adapter_start=6)) == 12
    assert run_through(kv, sequence_of(PROMPT, adapter="b", adapter_start=6)) == 4


@pytest.mark.parametrize(("one", "other"), [(0, 2), (2, 0), (1, 2), (5, 6)])
def test_an_adapter_activated_elsewhere_in_a_block_is_not_found_behind_it(
    one: int, other: int
) -> None:
    kv = kv_manager(20)
    run_through(kv, sequence_of(PROMPT, adapter="a", adapter_start=one))

    found = run_through(kv, sequence_of(PROMPT, adapter="a", adapter_start=other))

    assert found == min(one, other) // BLOCK * BLOCK


TWO_DEPTHS = [KVGroup((0,), FullAttention()), KVGroup((1,), FullAttention())]


def test_groups_below_an_adapters_frontier_share_what_is_computed_all_the_same() -> None:
    kv = kv_manager(20, BLOCK, TWO_DEPTHS)
    base, adapted = sequence_of(PROMPT), sequence_of(PROMPT, adapter="a", frontier=1)
    admit(kv, base)
    compute(kv, base)

    assert admit(kv, adapted) == 0
    for num_tokens in (2, 3, 8):  # stops inside shared blocks, too
        compute(kv, adapted, num_tokens)

    lower, upper = kv.block_ids(adapted)[:, :4] == kv.block_ids(base)[:, :4]
    assert (lower.tolist(), upper.tolist()) == ([True, True, True, False], [False] * 4)
    assert kv.first_writable(adapted).tolist() == [12, 0]
    assert kv.num_copied_blocks == 0


def test_where_all_groups_are_below_the_frontier_nothing_is_computed_again() -> None:
    kv = kv_manager(20, BLOCK, TWO_DEPTHS)
    run_through(kv, sequence_of(PROMPT))

    assert run_through(kv, sequence_of(PROMPT, adapter="a", frontier=2)) == 12


def sliding(window: int, num_blocks: int = 30) -> KVCacheManager:
    return kv_manager(num_blocks, BLOCK, [*FULL, KVGroup((1,), SlidingWindow(window))])


@pytest.mark.parametrize(("window", "blocks_held"), [(1, 0), (2, 1), (5, 1), (6, 2), (9, 2)])
def test_a_sliding_group_takes_only_the_blocks_in_its_window(window: int, blocks_held: int) -> None:
    kv = sliding(window)
    run_through(kv, sequence_of(PROMPT))
    again = sequence_of(PROMPT)

    assert admit(kv, again) == 12
    assert (kv.block_ids(again)[1] > 0).sum() == blocks_held


def test_a_sliding_group_needs_no_block_behind_its_window() -> None:
    kv = sliding(5)
    first = sequence_of(PROMPT)
    admit(kv, first)
    passed = []
    for _ in range(4):
        compute(kv, first, min(4, first.num_uncomputed_tokens))
        passed.append(kv.pool.blocks[int(kv.block_ids(first)[1, 0])])
    forget(kv.pool, passed[0].block_id)

    assert run_through(kv, sequence_of(PROMPT)) == 12


def test_a_gap_in_the_window_shortens_the_hit_to_where_all_groups_agree() -> None:
    kv = sliding(5)
    first = sequence_of(PROMPT)
    admit(kv, first)
    compute(kv, first)
    in_window = int(kv.block_ids(first)[1, 2])
    kv.free(first)
    forget(kv.pool, in_window)

    assert run_through(kv, sequence_of(PROMPT)) == 8


def forget(pool: BlockPool, block_id: int) -> None:
    """Hands out just this cached block and takes it back blank."""
    others = [b for b in pool.blocks[1:] if b.ref_count == 0 and b.key and b.block_id != block_id]
    for block in others:
        pool.retain(block)
    blank = [pool.allocate("tenant") for _ in range(pool.num_free)]
    pool.release([*blank, *others])
