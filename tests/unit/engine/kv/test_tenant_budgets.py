"""Budgets as a client meets them: shares set at run time, refusals with numbers, what each used."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engine.engines import drain, make_engine, publish, request, run, run_one
from support.models.architectures import write_checkpoint

from loraplex.engine.errors import RequestRejected
from loraplex.engine.kv.budgets import OPERATOR
from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import (
    BasePromptPublished,
    BlockState,
    FailureCode,
    FinishReason,
    GetBlockMap,
    PublishBasePrompt,
    RequestFailed,
    SetTenantShares,
    TenantShare,
    TenantStats,
)

BLOCK = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"), "llama")


def small_engine(model: Path, folder: Path, **settings: Any) -> LLMEngine:
    """One of few blocks, so that a flood is soon over."""
    return make_engine(
        model, folder / "store", kv_cache_memory=200_000, max_model_len=128, **settings
    )


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[LLMEngine]:
    engine = small_engine(model, tmp_path)
    yield engine
    engine.close()


def prompt(seed: int, num_tokens: int) -> list[int]:
    return [3 + (seed * 131 + i * 7) % 250 for i in range(num_tokens)]


def share(engine: LLMEngine, *shares: TenantShare) -> None:
    engine.submit(SetTenantShares("shares", list(shares)))


def stats_of(engine: LLMEngine, tenant: str) -> TenantStats:
    return next(stats for stats in engine.stats().tenants if stats.tenant == tenant)


def ask(engine: LLMEngine, tenant: str, token_ids: list[int], name: str = "r") -> int:
    """Cached tokens of one request in the tenant's namespace."""
    item = request(token_ids, name, tenant=tenant, namespace=tenant, max_tokens=2)
    usage = run_one(engine, item).usage
    assert usage is not None
    return usage.cached_tokens


@pytest.mark.parametrize(("floor", "cached"), [(0, 0), (12, 40)])
def test_a_quiet_tenants_cache_outlives_a_flood_on_its_floor_only(
    engine: LLMEngine, floor: int, cached: int
) -> None:
    share(engine, TenantShare("quiet", floor=floor))
    ask(engine, "quiet", prompt(0, 41))
    for seed in range(1, 2 + engine.info.num_blocks // 20):
        ask(engine, "flooder", prompt(seed, 100))

    assert ask(engine, "quiet", prompt(0, 41)) == cached


@pytest.mark.parametrize(
    ("settings", "cached"),
    [
        ({"eviction": "cost"}, 40),
        ({"eviction": "cost", "eviction_half_life": 1e-3}, 0),
        ({"eviction": "lru"}, 0),
    ],
    ids=["often", "lately", "lru"],
)
def test_what_is_used_often_outlives_a_flood_as_the_settings_say(
    model: Path, tmp_path: Path, settings: dict[str, Any], cached: int
) -> None:
    engine = small_engine(model, tmp_path, **settings)
    for _ in range(4):
        ask(engine, "regular", prompt(0, 41))
    for seed in range(1, 2 + engine.info.num_blocks // 20):
        ask(engine, "flooder", prompt(seed, 100))

    assert ask(engine, "regular", prompt(0, 41)) == cached
    engine.close()


def test_a_prompt_above_its_tenants_ceiling_is_refused_with_the_numbers(engine: LLMEngine) -> None:
    share(engine, TenantShare("capped", ceiling=5))

    with pytest.raises(RequestRejected, match=r"20 tokens.* takes 6 blocks.* can have 5") as caught:
        engine.add(request(prompt(0, 20), tenant="capped"))

    assert (caught.value.code, caught.value.param) == (FailureCode.BUDGET_EXCEEDED, "prompt")


def test_an_answer_ends_where_its_tenants_ceiling_does(engine: LLMEngine) -> None:
    share(engine, TenantShare("capped", ceiling=5))

    choice = run_one(engine, request(prompt(0, 10), tenant="capped", max_tokens=100))

    assert (choice.finish_reason, 10 + len(choice.token_ids)) == (FinishReason.LENGTH, 5 * BLOCK)


def test_a_base_prompt_costs_its_users_nothing(engine: LLMEngine) -> None:
    ref = publish(engine, prompt(0, 40))
    share(engine, TenantShare("capped", ceiling=3))

    run_one(engine, request(prompt(1, 6), tenant="capped", base_prompt=ref, max_tokens=4))

    assert stats_of(engine, OPERATOR).held_blocks == 10
    assert stats_of(engine, "capped").saved_block_seconds > 0


def test_a_ceiling_can_be_lowered_under_a_running_request_which_then_fails(
    engine: LLMEngine,
) -> None:
    engine.add(request(prompt(0, 30), "large", tenant="tenant", max_tokens=60))
    engine.add(request(prompt(1, 30), "other", tenant="other", max_tokens=10))
    engine.step()
    share(engine, TenantShare("tenant", ceiling=6))

    failures = [event for event in drain(engine) if isinstance(event, RequestFailed)]

    assert [(event.request_id, event.code) for event in failures] == [
        ("large", FailureCode.BUDGET_EXCEEDED)
    ]
    assert engine.stats().num_free_blocks == engine.info.num_blocks


def test_shares_that_do_not_fit_are_refused_with_every_fault(engine: LLMEngine) -> None:
    shares = [TenantShare("a", floor=10**6), TenantShare("b", floor=-1)]

    with pytest.raises(RequestRejected) as caught:
        share(engine, *shares)

    assert len(caught.value.faults) == 2
    assert all(stats.floor == 0 for stats in engine.stats().tenants)


def test_a_weight_reaches_the_policy(engine: LLMEngine) -> None:
    share(engine, TenantShare("heavy", weight=3.0))

    assert stats_of(engine, "heavy").weight == 3.0


def test_what_tenants_used_is_told_apart(engine: LLMEngine) -> None:
    run(
        engine,
        [
            request(prompt(1, 20), "a", tenant="one", namespace="one", n=2),
            request(prompt(2, 9), "b", tenant="two", namespace="two"),
        ],
    )

    one, two = stats_of(engine, "one"), stats_of(engine, "two")

    assert one.shared_block_seconds > two.shared_block_seconds == 0
    assert one.private_block_seconds > two.private_block_seconds > 0
    assert (one.num_queued, two.num_queued) == (1, 1)
    assert (one.cached_blocks, two.cached_blocks) == (6, 4)
    assert (one.prefill_tokens, two.prefill_tokens) == (20, 9)


def test_the_block_map_shows_who_has_what(engine: LLMEngine) -> None:
    ask(engine, "tenant", prompt(0, 20))

    (found,) = engine.submit(GetBlockMap("map"))

    counts = {(found.owners[run.owner], run.state): run.count for run in found.runs}
    assert counts["tenant", BlockState.CACHED] == 5
    assert counts["", BlockState.BLANK] == engine.info.num_blocks - 5


def test_floors_leave_a_base_prompt_the_blocks_that_it_still_needs(engine: LLMEngine) -> None:
    tokens = prompt(0, 100)
    engine.add(request(prompt(1, 8), "borrower", tenant="other", max_tokens=20))
    engine.step()
    engine.submit(
        PublishBasePrompt(request_id="pub", prompt_id="prompt", version=1, token_ids=tokens)
    )
    engine.step()
    rest = engine.info.num_blocks - 100 // BLOCK

    with pytest.raises(RequestRejected, match=f"floors add up to {rest + 26} blocks"):
        share(engine, TenantShare("tenant", floor=rest + 1))
    share(engine, TenantShare("tenant", floor=rest))
    engine.add(request(prompt(2, 8), tenant="tenant"))

    outcomes = {type(event): event for event in drain(engine)}
    failed = outcomes[RequestFailed]
    assert isinstance(failed, RequestFailed)
    assert failed.request_id == "borrower"
    assert BasePromptPublished in outcomes
    assert engine.stats().num_preemptions == 1
