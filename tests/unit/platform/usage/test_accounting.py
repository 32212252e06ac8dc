"""Each call is reserved once, settled once and recorded once, whichever way it ends."""

from collections.abc import AsyncGenerator

import pytest
from support.models.word_tokenizer import word_tokenizer

from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.protocol import FinishReason, GenerateRequest, TokenEvent
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.auth.principal import Principal, TenantId
from loraplex.platform.errors import TooManyRequests
from loraplex.platform.inference.generation import ChoiceEvent, Generation, Prompt
from loraplex.platform.quotas.service import InMemoryQuotas
from loraplex.platform.usage.accounting import Accounting
from loraplex.platform.usage.sink import InMemoryUsage, Outcome

pytestmark = pytest.mark.anyio

TOKENIZER = Tokenizer(word_tokenizer(), {}, {})
CALLER = Principal(TenantId("t"), "namespace", "key", frozenset())
EVENTS = [(0, 0, [5]), (0, 1, [6, 7]), (1, 2, [8])]  # prompt, choice, tokens


def call(choices_per_prompt: int = 2) -> Generation:
    """Two prompts of 3 and 2 tokens."""
    prompts = [Prompt([1, 2, 3], "one"), Prompt([1, 2], "two")]
    requests = [
        GenerateRequest(
            request_id=f"call-{number}",
            tenant="t",
            namespace="namespace",
            prompt_token_ids=prompt.token_ids,
            sampling=SamplingParams(n=choices_per_prompt, max_tokens=4),
        )
        for number, prompt in enumerate(prompts)
    ]
    return Generation("call", 0, "base", prompts, requests, TOKENIZER, "fingerprint")


async def tokens(then: Exception | None = None) -> AsyncGenerator[ChoiceEvent, None]:
    for prompt, choice, ids in EVENTS:
        event = TokenEvent(
            request_id=f"call-{prompt}",
            index=choice % 2,
            token_ids=ids,
            text="",
            cached_tokens=2,
            finish_reason=FinishReason.LENGTH,
        )
        yield ChoiceEvent(prompt, choice, event)
    if then is not None:
        raise then


Books = tuple[Accounting, InMemoryQuotas, InMemoryUsage]


@pytest.fixture
def books() -> Books:
    quotas, usage = InMemoryQuotas(max_choices=4), InMemoryUsage()
    return Accounting(quotas, usage), quotas, usage


async def test_a_whole_call_is_recorded_with_each_prompt_once(books: Books) -> None:
    accounting, quotas, usage = books

    passed = [item async for item in accounting.account(CALLER, call(), tokens())]

    (event,) = usage.events
    assert len(passed) == len(EVENTS)
    assert (event.prompt_tokens, event.cached_tokens, event.completion_tokens) == (5, 4, 4)
    assert (event.outcome, event.tenant, event.key_id) == (Outcome.COMPLETE, "t", "key")
    assert quotas.num_open("t") == 0


async def test_a_client_that_hangs_up_has_used_what_came(books: Books) -> None:
    accounting, quotas, usage = books
    events = accounting.account(CALLER, call(), tokens())
    await anext(events)
    assert quotas.num_open("t") == 4

    await events.aclose()

    (event,) = usage.events
    assert (event.prompt_tokens, event.completion_tokens) == (3, 1)
    assert event.outcome is Outcome.CLIENT_GONE
    assert quotas.num_open("t") == 0


async def test_an_engine_that_fails_ends_the_reservation(books: Books) -> None:
    accounting, quotas, usage = books

    with pytest.raises(EngineUnavailable):
        async for _ in accounting.account(CALLER, call(), tokens(EngineUnavailable())):
            pass

    assert [event.outcome for event in usage.events] == [Outcome.FAILED]
    assert quotas.num_open("t") == 0


async def test_a_call_beyond_the_limit_uses_nothing_and_reaches_no_engine(books: Books) -> None:
    accounting, _quotas, usage = books
    first = accounting.account(CALLER, call(), tokens())
    await anext(first)

    with pytest.raises(TooManyRequests, match="asks for 2 choices while this tenant has 4 open"):
        await anext(accounting.account(CALLER, call(choices_per_prompt=1), tokens()))

    assert len(usage.events) == 0
    await first.aclose()
    assert await anext(accounting.account(CALLER, call(), tokens())) is not None


async def test_a_limit_is_each_tenants_own(books: Books) -> None:
    accounting, _, _ = books
    other = Principal(TenantId("other"), "namespace", "key", frozenset())
    await anext(accounting.account(CALLER, call(), tokens()))

    assert await anext(accounting.account(other, call(), tokens())) is not None


async def test_memory_keeps_the_latest_events() -> None:
    usage = InMemoryUsage(kept=2)

    for _ in range(3):
        async for _ in Accounting(InMemoryQuotas(), usage).account(CALLER, call(), tokens()):
            pass

    assert len(usage.events) == 2
