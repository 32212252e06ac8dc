"""Base prompts change by versions, and leave when the last user of theirs is gone."""

from pathlib import Path

import pytest
from support.engine.engines import drain, make_engine, publish, request, retire, run, run_one
from support.visits import count_visits

from loraplex.engine.errors import RequestRejected
from loraplex.engine.kv.budgets import OPERATOR
from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import (
    BasePromptPublished,
    BasePromptRef,
    BasePromptRetired,
    Event,
    PositionLogprobs,
    PublishBasePrompt,
    TokenEvent,
)

OLD = [(7 * i + 3) % 300 + 3 for i in range(22)]
NEW = [*OLD[:14], *[(11 * i + 5) % 300 + 3 for i in range(13)]]
REST = [11, 12, 13, 14, 15]


def test_a_request_ends_on_the_version_that_it_began_with(
    engine: LLMEngine, cold: LLMEngine
) -> None:
    old = publish(engine, OLD, version=1)
    engine.add(request(REST, "old", base_prompt=old, max_tokens=20))
    first = engine.step()
    new = publish_beside(engine, NEW)
    retire(engine, old)
    engine.add(request(REST, "new", namespace="other", base_prompt=new, max_tokens=20))

    events = [*first, *drain(engine)]

    found = {name: tokens_of(events, name) for name in ("old", "new")}
    expected = {
        name: run_one(cold, request([*prompt, *REST], max_tokens=20)).token_ids
        for name, prompt in (("old", OLD), ("new", NEW))
    }
    assert found == expected
    assert [item.info.ref for item in engine.stats().base_prompts] == [new]


def test_what_a_version_shares_with_another_outlives_it(engine: LLMEngine) -> None:
    old, new = publish(engine, OLD, version=1), publish(engine, NEW, version=2)
    retire(engine, old)
    drain(engine)

    answer = run_one(engine, request(REST, namespace="other", base_prompt=new))
    left = run_one(engine, request([*OLD, *REST], namespace="other"))

    assert [a.usage.cached_tokens for a in (answer, left) if a.usage] == [len(NEW), 12]


def test_a_retired_prompt_gains_no_users(engine: LLMEngine) -> None:
    ref = publish(engine, OLD)
    engine.add(request(REST, "user", base_prompt=ref, max_tokens=4))
    retire(engine, ref)
    engine.add(request([*OLD, *REST], "late", max_tokens=20))

    kinds = [
        event.request_id
        for event in drain(engine)
        if isinstance(event, BasePromptRetired) or getattr(event, "finish_reason", None)
    ]

    assert kinds == ["user", "retire", "late"]


def test_a_retired_prompt_stays_for_users_that_wait_and_goes_once(
    engine: LLMEngine, cold: LLMEngine
) -> None:
    ref = publish(engine, OLD)
    for i in range(10):  # two more than run at once
        engine.add(request(REST, f"r{i}", namespace=f"n{i}", base_prompt=ref, max_tokens=2 + i))
    engine.step()
    retire(engine, ref)

    events = drain(engine)

    assert [event for event in events if isinstance(event, BasePromptRetired)] == events[-1:]
    assert engine.stats().computed_prompt_tokens == len(OLD) + 10 * len(REST)
    alone = run_one(cold, request([*OLD, *REST], max_tokens=11)).token_ids
    assert tokens_of(events, "r9") == alone


def test_a_prompt_that_is_retired_while_users_wait_for_it_is_computed_for_them(
    engine: LLMEngine,
) -> None:
    ref = publish_beside(engine, OLD)
    for name in ("a", "b"):
        engine.add(request(REST, name, namespace=name, base_prompt=ref))
    retire(engine, ref)

    events = drain(engine)

    assert any(isinstance(event, BasePromptPublished) for event in events)
    assert events[-1] == BasePromptRetired("retire")
    assert engine.stats().computed_prompt_tokens == len(OLD) + 2 * len(REST)


def test_retiring_looks_at_no_more_requests_where_more_wait(engine: LLMEngine) -> None:
    ref = publish(engine, OLD)
    visits = []
    for start, end in ((0, 20), (20, 400)):
        for i in range(start, end):
            engine.add(request(REST, f"r{i}", base_prompt=ref, max_tokens=2))
        visits.append(count_visits(engine.stats))
    retire(engine, ref)
    visits.append(count_visits(engine._base_prompts.outcomes))

    few, many, retiring = visits
    (prompt,) = engine.stats().base_prompts

    assert prompt.num_users == 400
    assert max(many, retiring) <= few


def test_a_version_that_is_being_retired_is_not_published_again(engine: LLMEngine) -> None:
    ref = publish(engine, OLD, version=2)
    engine.add(request(REST, base_prompt=ref))
    retire(engine, ref)

    with pytest.raises(RequestRejected, match="is being retired"):
        publish_beside(engine, OLD)
    with pytest.raises(RequestRejected, match="no base prompt of this name"):
        retire(engine, ref)


def test_the_blocks_of_a_retired_prompt_hold_nothing_any_more(engine: LLMEngine) -> None:
    ref = publish(engine, OLD)
    operator = engine.stats().tenants[0]
    retire(engine, ref)
    drain(engine)

    after = engine.stats().tenants[0]

    assert (operator.tenant, operator.held_blocks) == (OPERATOR, 6 + 5 * 4)
    assert after.held_blocks == 0
    assert after.evictions["retired"] == 5 + 5 * 3  # the others were half full


def test_tokens_are_saved_once_for_all_choices_and_only_the_prompts(engine: LLMEngine) -> None:
    ref = publish(engine, OLD)

    for _ in range(2):  # the second finds more than the prompt
        run(engine, [request(REST, base_prompt=ref, n=3)])

    assert engine.stats().base_prompt_saved_tokens == 2 * len(OLD)


@pytest.mark.parametrize("scheduling", ["fair", "fcfs"])
def test_a_prompt_goes_before_requests_that_wait(
    model: Path, tmp_path: Path, scheduling: str
) -> None:
    engine = make_engine(model, tmp_path / "store", kernels="naive", scheduling=scheduling)
    for i in range(4):
        engine.add(request(REST * 5, f"r{i}", namespace=f"n{i}", priority=-5))
    publish_beside(engine, OLD)

    events = engine.step()
    engine.close()

    assert any(isinstance(event, BasePromptPublished) for event in events)


def test_logprobs_of_a_prompt_are_those_of_all_its_tokens(
    engine: LLMEngine, cold: LLMEngine
) -> None:
    ref = publish(engine, OLD)

    answer = run_one(engine, request(REST, base_prompt=ref, prompt_logprobs=0))

    alone = run_one(cold, request([*OLD, *REST], prompt_logprobs=0))
    assert answer.usage is not None
    assert answer.usage.cached_tokens == 0
    assert chosen(answer.prompt_logprobs) == pytest.approx(chosen(alone.prompt_logprobs), abs=1e-4)


def publish_beside(engine: LLMEngine, token_ids: list[int]) -> BasePromptRef:
    """Publishes version 2 while requests run."""
    engine.submit(
        PublishBasePrompt(request_id="pub", prompt_id="prompt", version=2, token_ids=token_ids)
    )
    return BasePromptRef(prompt_id="prompt", version=2)


def tokens_of(events: list[Event], name: str) -> list[int]:
    tokens = [e for e in events if isinstance(e, TokenEvent) and e.request_id == name]
    return [token for event in tokens for token in event.token_ids]


def chosen(logprobs: list[PositionLogprobs | None] | None) -> list[float]:
    return [item.chosen.logprob for item in logprobs or [] if item is not None]
