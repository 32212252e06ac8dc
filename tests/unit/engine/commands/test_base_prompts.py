"""Base prompts: published once, shared by everybody in full, retired when the last user is gone."""

import pytest
from support.engine.engines import Choice, drain, publish, request, retire, run, run_one

from loraplex.engine.errors import RequestRejected
from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import (
    BasePromptRef,
    BasePromptRetired,
    Event,
    FailureCode,
    PublishBasePrompt,
    RequestFailed,
)

BLOCK = 4
PROMPT = [(7 * i + 3) % 300 + 3 for i in range(22)]  # five blocks and a half
REST = [11, 12, 13, 14, 15]


def cached(choice: Choice) -> int:
    assert choice.usage is not None
    return choice.usage.cached_tokens


@pytest.mark.parametrize("num_own", [1, 5])
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 20, 21, 22, 23])
def test_every_tenant_shares_a_prompt_of_any_length_in_full(
    engine: LLMEngine, cold: LLMEngine, length: int, num_own: int
) -> None:
    prompt, own = (PROMPT + PROMPT)[:length], REST[:num_own]
    ref = publish(engine, prompt)
    alone = run_one(cold, request([*prompt, *own]))

    answers = [
        run_one(engine, request(own, tenant=name, namespace=name, base_prompt=ref))
        for name in ("a", "b", "c")
    ]

    assert [cached(answer) for answer in answers] == [length] * 3
    assert {tuple(answer.token_ids) for answer in answers} == {tuple(alone.token_ids)}


def test_a_prompt_is_used_because_the_tokens_begin_with_it(engine: LLMEngine) -> None:
    publish(engine, PROMPT)

    answer = run_one(engine, request([*PROMPT, *REST]))

    assert cached(answer) == 22


@pytest.mark.parametrize(("agreeing", "shared"), [(3, 0), (4, 4), (9, 8), (20, 20), (21, 20)])
def test_of_a_prompt_that_the_tokens_leave_whole_blocks_are_shared(
    engine: LLMEngine, agreeing: int, shared: int
) -> None:
    publish(engine, PROMPT)

    answer = run_one(engine, request([*PROMPT[:agreeing], 1, *REST]))

    assert cached(answer) == shared


@pytest.mark.parametrize("length", [1, 2, BLOCK, BLOCK + 1, 20, 22])
def test_a_request_of_nothing_but_the_prompt_computes_its_last_token(
    engine: LLMEngine, cold: LLMEngine, length: int
) -> None:
    ref = publish(engine, PROMPT[:length])

    answers = [run_one(engine, request([], namespace=name, base_prompt=ref)) for name in ("a", "b")]

    assert [cached(answer) for answer in answers] == [length - 1] * 2
    alone = run_one(cold, request(PROMPT[:length]))
    assert {tuple(answer.token_ids) for answer in answers} == {tuple(alone.token_ids)}


def test_a_named_prompt_is_put_before_tokens_that_begin_with_it(
    engine: LLMEngine, cold: LLMEngine
) -> None:
    ref = publish(engine, PROMPT)

    answer = run_one(engine, request([*PROMPT, *REST], base_prompt=ref))

    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2 * len(PROMPT) + len(REST)
    assert answer.token_ids == run_one(cold, request([*PROMPT, *PROMPT, *REST])).token_ids


@pytest.mark.parametrize("longer", [24, 28, 30])
def test_of_two_prompts_that_the_tokens_begin_with_the_longer_is_used(
    engine: LLMEngine, longer: int
) -> None:
    both = (PROMPT + PROMPT)[:longer]
    publish(engine, both, version=2)
    publish(engine, PROMPT)

    answers = [run_one(engine, request([*prompt, *REST])) for prompt in (both, PROMPT)]
    engine.add(request([*both, *REST], "user"))
    users = {item.info.ref.version: item.num_users for item in engine.stats().base_prompts}

    assert [cached(answer) for answer in answers] == [longer, 22]
    assert users == {1: 0, 2: 1}


def test_a_named_prompt_counts_as_prompt_tokens(engine: LLMEngine) -> None:
    ref = publish(engine, PROMPT)

    answer = run_one(engine, request(REST, base_prompt=ref))

    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(PROMPT) + len(REST)


def test_what_follows_a_prompt_stays_in_its_tenants_namespace(engine: LLMEngine) -> None:
    ref = publish(engine, PROMPT)
    long = [*REST, *REST, *REST]

    answers = [
        run_one(engine, request(long, tenant=name, namespace=name, base_prompt=ref))
        for name in ("a", "b", "a")
    ]

    assert [cached(answer) for answer in answers] == [22, 22, 36]


def test_what_was_private_before_a_prompt_is_published_stays_private(engine: LLMEngine) -> None:
    run_one(engine, request([*PROMPT, *REST], tenant="a", namespace="a"))
    other = run_one(engine, request([*PROMPT, *REST], tenant="b", namespace="b"))
    publish(engine, PROMPT[:8])

    third = run_one(engine, request([*PROMPT, *REST], tenant="c", namespace="c"))

    assert (cached(other), cached(third)) == (0, 8)


def test_a_prompt_is_computed_once_however_many_wait_for_it(engine: LLMEngine) -> None:
    engine.submit(command(PROMPT))

    for i in range(3):
        engine.add(request([*PROMPT, *REST], f"r{i}", namespace=f"n{i}"))

    drain(engine)

    assert engine.stats().computed_prompt_tokens == len(PROMPT) + 3 * len(REST)


def test_a_long_prompt_is_computed_in_chunks_beside_others(engine: LLMEngine) -> None:
    engine.add(request(REST, "running", max_tokens=20))
    engine.step()
    engine.submit(command((PROMPT * 6)[:120]))

    kinds = [type(event).__name__ for event in drain(engine)]

    assert "BasePromptPublished" in kinds[:-5]
    assert kinds.count("TokenEvent") == 19


def test_its_blocks_are_one_copy_and_a_private_one_per_running_sequence(engine: LLMEngine) -> None:
    ref = publish(engine, PROMPT)
    before = engine.stats()
    for i in range(4):
        engine.add(request(REST[:1], f"r{i}", namespace=f"n{i}", base_prompt=ref, max_tokens=9))
    engine.step()
    running = engine.stats()
    drain(engine)

    num_groups = 6
    assert before.num_free_blocks - running.num_free_blocks == 4 * num_groups
    (prompt,) = running.base_prompts
    assert prompt.num_users == 4
    assert prompt.num_saved_blocks == 3 * (prompt.info.num_blocks - num_groups)
    assert running.base_prompt_saved_tokens == 4 * len(PROMPT)


def test_nothing_is_saved_by_prompts_that_only_share_with_each_other(engine: LLMEngine) -> None:
    first, second = publish(engine, PROMPT, version=1), publish(engine, PROMPT[:20], version=2)
    idle = [item.num_saved_blocks for item in engine.stats().base_prompts]
    for i, ref in enumerate((first, first, second)):
        engine.add(request(REST, f"r{i}", namespace=f"n{i}", base_prompt=ref))
    engine.step()
    saved = [item.num_saved_blocks > 0 for item in engine.stats().base_prompts]

    assert (idle, saved) == ([0, 0], [True, False])


def test_the_same_prompt_again_changes_nothing(engine: LLMEngine) -> None:
    publish(engine, PROMPT)
    computed = engine.stats().computed_prompt_tokens

    publish(engine, PROMPT)

    assert engine.stats().computed_prompt_tokens == computed
    assert len(engine.stats().base_prompts) == 1


def test_other_tokens_under_the_same_version_are_refused(engine: LLMEngine) -> None:
    publish(engine, PROMPT)

    with pytest.raises(RequestRejected, match="publish a new version"):
        engine.submit(command(PROMPT[:-1]))


def test_versions_share_what_they_have_in_common(engine: LLMEngine) -> None:
    publish(engine, PROMPT, version=1)
    computed = engine.stats().computed_prompt_tokens

    publish(engine, [*PROMPT[:20], 9, 9, 9, 9], version=2)

    assert engine.stats().computed_prompt_tokens - computed == 4


@pytest.mark.parametrize(
    ("token_ids", "code"),
    [
        ([], FailureCode.INVALID_REQUEST),
        ([-1], FailureCode.INVALID_REQUEST),
        ([10**6], FailureCode.INVALID_REQUEST),
        ([5] * 256, FailureCode.CONTEXT_LENGTH_EXCEEDED),
    ],
)
def test_what_is_no_prompt_is_refused(
    engine: LLMEngine, token_ids: list[int], code: FailureCode
) -> None:
    with pytest.raises(RequestRejected) as refusal:
        engine.submit(command(token_ids))

    assert refusal.value.code is code


def test_prompts_may_keep_half_of_the_memory_and_no_more(engine: LLMEngine) -> None:
    fill(engine)

    with pytest.raises(RequestRejected, match=r"base prompts may keep \d+ of \d+") as refusal:
        engine.submit(command([3] * 200))

    assert refusal.value.code is FailureCode.BUDGET_EXCEEDED
    assert engine.stats().num_free_blocks >= engine.stats().num_blocks // 2


def test_an_unknown_prompt_is_refused(engine: LLMEngine) -> None:
    unknown = BasePromptRef(prompt_id="prompt", version=7)

    with pytest.raises(RequestRejected) as refusal:
        engine.add(request(REST, base_prompt=unknown))

    assert refusal.value.code is FailureCode.BASE_PROMPT_NOT_FOUND


def test_a_retired_prompt_takes_no_request_and_goes_with_its_last_user(
    engine: LLMEngine, cold: LLMEngine
) -> None:
    ref = publish(engine, PROMPT)
    engine.add(request(REST, "user", base_prompt=ref, max_tokens=12))
    engine.step()
    retire(engine, ref)
    with pytest.raises(RequestRejected) as refusal:
        engine.add(request(REST, "late", base_prompt=ref))

    *tokens, last = drain(engine)

    assert refusal.value.code is FailureCode.BASE_PROMPT_NOT_FOUND
    assert last == BasePromptRetired("retire")
    expected = run_one(cold, request([*PROMPT, *REST], max_tokens=12)).token_ids
    assert tokens_of(tokens) == expected[1:]
    assert engine.stats().base_prompts == []
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_retired_prompt_can_be_published_again(engine: LLMEngine) -> None:
    retire(engine, publish(engine, PROMPT))
    drain(engine)

    ref = publish(engine, [5, 6, 7])

    assert cached(run_one(engine, request(REST, base_prompt=ref))) == 3


def test_a_prompt_that_is_retired_before_it_is_computed_fails_its_publication(
    engine: LLMEngine,
) -> None:
    engine.submit(command(PROMPT))
    retire(engine, BasePromptRef(prompt_id="prompt", version=1))

    failed, retired = drain(engine)

    assert retired == BasePromptRetired("retire")
    assert isinstance(failed, RequestFailed)
    assert failed.request_id == "pub"
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_aborting_users_leaves_the_prompt_whole(engine: LLMEngine) -> None:
    ref = publish(engine, PROMPT)
    kept = engine.stats().num_free_blocks
    engine.add(request(REST, "gone", base_prompt=ref, n=3, temperature=1.0))
    engine.step()
    engine.abort("gone")

    assert engine.stats().num_free_blocks == kept
    assert cached(run_one(engine, request(REST, namespace="other", base_prompt=ref))) == 22


@pytest.mark.parametrize("num_own", [0, 1, 2, 3])  # the fork is before, at and behind an edge
def test_choices_fork_behind_a_shared_prompt(
    engine: LLMEngine, cold: LLMEngine, num_own: int
) -> None:
    ref = publish(engine, PROMPT)
    own = REST[:num_own]
    sampling = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 9}

    shared = run(engine, [request(own, base_prompt=ref, **sampling)])["r"]

    alone = run(cold, [request([*PROMPT, *own], **sampling)])["r"]
    assert [choice.token_ids for choice in shared] == [choice.token_ids for choice in alone]


def fill(engine: LLMEngine) -> None:
    """Publishes prompts of 200 tokens until half of the memory has no room for one more."""
    info = engine.info
    per_prompt = 200 // info.block_size + 5 * (12 // info.block_size + 1)
    for version in range(2, 2 + info.num_blocks // 2 // per_prompt):
        publish(engine, [version + 3] * 200, version=version)


def command(token_ids: list[int]) -> PublishBasePrompt:
    return PublishBasePrompt(request_id="pub", prompt_id="prompt", version=1, token_ids=token_ids)


def tokens_of(events: list[Event]) -> list[int]:
    return [t for event in events for t in getattr(event, "token_ids", [])]
