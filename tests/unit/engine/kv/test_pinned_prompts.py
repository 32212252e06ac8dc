"""Whose the blocks of base prompts are, who writes into them, and how much adapters share."""

import pytest
from support.engine.kv import admit, compute, kv_manager, run_through, sequence_of

from loraplex.engine.kv.budgets import OPERATOR
from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.kv.pinned_prompts import PinnedPrompt
from loraplex.engine.kv.storage.groups import KVGroup
from loraplex.engine.kv.storage.layer_state import FullAttention
from loraplex.engine.protocol import BasePromptRef
from loraplex.engine.sequence import Sequence

BLOCK = 4
TOKENS = list(range(1, 18))
TWO_LAYERS = [KVGroup((0,), FullAttention()), KVGroup((1,), FullAttention())]


def add(kv: KVCacheManager, length: int, version: int = 1) -> PinnedPrompt:
    """A prompt that is to be computed."""
    sequence = sequence_of(TOKENS[:length], namespace=OPERATOR)
    sequence.tenant = OPERATOR
    return kv.prompts.add(BasePromptRef(prompt_id="prompt", version=version), sequence)


def publish(kv: KVCacheManager, length: int, version: int = 1) -> PinnedPrompt:
    prompt = add(kv, length, version)
    admit(kv, prompt.sequence)
    compute(kv, prompt.sequence)
    kv.pin(prompt)
    return prompt


def adapted(length: int, start: int, frontier: int) -> Sequence:
    return sequence_of(TOKENS[:length], adapter="a", adapter_start=start, frontier=frontier)


def test_blocks_that_a_tenant_computed_first_become_the_operators() -> None:
    kv = kv_manager(20)
    prompt = add(kv, 10)
    tenant = sequence_of(TOKENS[:10])
    admit(kv, tenant)
    compute(kv, tenant)

    assert admit(kv, prompt.sequence) == 8
    compute(kv, prompt.sequence)
    kv.pin(prompt)

    budgets = kv.pool.budgets
    assert [budgets.of(name).held for name in (OPERATOR, tenant.tenant)] == [3, 1]


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("block_size", [1, BLOCK])
def test_nobody_writes_into_a_prompts_blocks(length: int, block_size: int) -> None:
    kv = kv_manager(40, block_size)
    prompt = publish(kv, length)
    whole = kv.held_blocks(prompt.sequence)

    for num_own in range(3):
        sequence = sequence_of(TOKENS[: length + num_own])
        start = admit(kv, sequence)
        assert kv.allocate_slots(sequence, sequence.num_uncomputed_tokens)
        written = kv.block_ids(sequence)[0, start // block_size :]
        assert not {block.block_id for block in whole} & set(written.tolist())


@pytest.mark.parametrize(
    ("start", "frontier", "shared"),
    [
        (0, 0, 0),  # differs in both layers
        (0, 1, 0),  # in the second
        (0, 2, 6),  # in none
        (5, 0, 4),  # behind the first block
        (5, 1, 4),
        (6, 0, 6),  # behind the prompt
    ],
)
def test_the_end_of_a_prompt_is_shared_where_the_base_fills_it_in_all_layers(
    start: int, frontier: int, shared: int
) -> None:
    kv = kv_manager(20, groups=TWO_LAYERS)
    publish(kv, 6)

    assert run_through(kv, adapted(9, start, frontier)) == shared


def test_a_sequence_above_a_frontier_shares_the_layers_below_with_a_prompt() -> None:
    kv = kv_manager(20, groups=TWO_LAYERS)
    publish(kv, 8)
    free = kv.pool.num_free

    sequence = adapted(9, 0, frontier=1)
    admit(kv, sequence)
    compute(kv, sequence)

    assert free - kv.pool.num_free == 1 + 3


def test_prompts_that_end_in_one_block_are_told_apart() -> None:
    kv = kv_manager(20)
    for version, length in enumerate((5, 7, 6, 8)):
        publish(kv, length, version)

    found = [run_through(kv, sequence_of([*TOKENS[:length], 99])) for length in range(4, 9)]

    assert found == [4, 5, 6, 7, 8]
