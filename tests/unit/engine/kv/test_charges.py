"""Who pays for a block, whichever way it came to be in a sequence's table."""

from support.engine.kv import FULL, admit, compute, kv_manager, run_through, sequence_of
from support.engine.offloading import OffloadingHarness
from support.engine.scheduling import Setup, generate_request

from loraplex.engine.kv.budgets import OPERATOR
from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.kv.pinned_prompts import PinnedPrompt
from loraplex.engine.protocol import BasePromptRef, TenantShare
from loraplex.engine.sequence import Sequence

PROMPT = list(range(3, 13))  # two blocks and a half
REST = [20, 21]


def sequence_for(account: str, token_ids: list[int]) -> Sequence:
    sequence = sequence_of(token_ids, namespace=account)
    sequence.tenant = account
    return sequence


def publish(kv: KVCacheManager) -> PinnedPrompt:
    """Announces a base prompt that is not computed yet."""
    ref = BasePromptRef(prompt_id="prompt", version=1)
    return kv.prompts.add(ref, sequence_for(OPERATOR, PROMPT))


def start(kv: KVCacheManager, sequence: Sequence) -> int:
    num_cached = admit(kv, sequence)
    compute(kv, sequence)
    return num_cached


def held(kv: KVCacheManager) -> dict[str, int]:
    return {account.name: account.held for account in kv.pool.budgets.accounts if account.held}


def test_a_block_that_a_tenants_sequences_share_is_paid_for_once() -> None:
    kv = kv_manager(20)
    run_through(kv, sequence_for("a", PROMPT))

    for _ in range(3):
        start(kv, sequence_for("a", PROMPT))

    assert held(kv) == {"a": 2 + 3}


def test_the_copy_of_a_shared_block_is_paid_for_by_whoever_writes() -> None:
    kv = kv_manager(20)
    parent = sequence_for("a", PROMPT)
    start(kv, parent)
    child = parent.fork(1)
    kv.fork(parent, child)
    child.token_ids.append(1)

    compute(kv, child)

    assert held(kv) == {"a": 3 + 1}


def test_what_follows_a_base_prompt_is_paid_for_by_the_tenant_and_the_prompt_by_the_operator() -> (
    None
):
    kv = kv_manager(20)
    prompt = publish(kv)
    start(kv, prompt.sequence)
    kv.pin(prompt)

    cached = [start(kv, sequence_for(name, [*PROMPT, *REST])) for name in "ab"]

    assert cached == [10, 10]
    assert held(kv) == {OPERATOR: 3, "a": 1, "b": 1}


def test_a_base_prompt_that_a_tenant_computed_first_is_paid_for_by_the_operator_as_well() -> None:
    kv = kv_manager(20)
    prompt = publish(kv)
    start(kv, sequence_for("a", [*PROMPT, *REST]))
    start(kv, prompt.sequence)

    kv.pin(prompt)

    assert held(kv) == {OPERATOR: 3, "a": 1}


def test_a_block_that_comes_back_from_below_is_paid_for_by_whoever_needs_it() -> None:
    harness = OffloadingHarness()
    for name in ("before", "now"):
        harness.flush_device()
        harness.add(generate_request(name, [*PROMPT, *REST], max_tokens=3, ignore_eos=True))
        harness.step()
        if name == "before":
            harness.run()

    assert harness.num_cached["now"] == 8
    blocks = harness.kv.held_blocks(harness.scheduler.running[0])
    assert held(harness.kv) == {"tenant": len(blocks)}


def test_blocks_that_come_back_from_below_need_room_as_new_ones_do() -> None:
    harness = OffloadingHarness(Setup(num_blocks=20, groups=FULL))
    prompts = {"first": [5] * 24, "second": [6] * 24}
    for name, prompt in prompts.items():
        harness.add(generate_request(f"{name} before", prompt, tenant="capped", max_tokens=2))
    harness.run()
    harness.flush_device()
    assert harness.kv.pool.set_shares([TenantShare("capped", ceiling=10)]) == []

    for name, prompt in prompts.items():
        harness.add(generate_request(name, [*prompt, 7], tenant="capped", max_tokens=2))
    harness.step()

    assert [s.request_id for s in harness.scheduler.running] == ["first"]
    harness.run()
    assert (harness.num_cached["first"], harness.num_cached["second"]) == (24, 24)
