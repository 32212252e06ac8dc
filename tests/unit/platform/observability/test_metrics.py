"""What an operator scrapes: all that is metered, tenant by tenant, in Prometheus' own form."""

import asyncio
from collections.abc import AsyncGenerator, Iterator

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from support.models.word_tokenizer import word_tokenizer

from loraplex.engine.kv.metering import EvictionCause
from loraplex.engine.protocol import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    TenantStats,
    TokenEvent,
    Usage,
)
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.engines.failover import FailoverStats
from loraplex.platform.inference.generation import ChoiceEvent, Generation, Prompt
from loraplex.platform.observability.metrics import Metrics

QUEUED = 0.001  # seconds, of all that a choice took to its first token


def numbered(tenant: str) -> TenantStats:
    """A tenant whose every field has a number of its own."""
    fields = [field.name for field in msgspec.structs.fields(TenantStats)]
    values = {name: float(place) for place, name in enumerate(fields, start=100)}
    evictions = {cause.value: place for place, cause in enumerate(EvictionCause, start=500)}
    return msgspec.convert(
        values | {"tenant": tenant, "evictions": evictions}, TenantStats, strict=False
    )


def samples(stats: EngineStats) -> Iterator[Sample]:
    text = Metrics("base", FailoverStats()).render(stats).decode()
    for family in text_string_to_metric_families(text):
        yield from family.samples


def of_tenants(stats: EngineStats) -> list[Sample]:
    return [sample for sample in samples(stats) if "tenant" in sample.labels]


def test_all_that_is_known_of_a_tenant_is_shown_once() -> None:
    tenant = numbered("t")
    known = [*msgspec.structs.asdict(tenant).values(), *tenant.evictions.values()]

    shown = [sample.value for sample in of_tenants(EngineStats(tenants=[tenant]))]

    assert sorted(shown) == sorted(value for value in known if not isinstance(value, str | dict))


def test_evictions_are_told_apart_by_cause() -> None:
    found = of_tenants(EngineStats(tenants=[numbered("t")]))

    causes = {sample.labels["cause"] for sample in found if "cause" in sample.labels}
    assert causes == {cause.value for cause in EvictionCause}


def test_a_tenant_without_a_ceiling_has_no_ceiling_of_zero() -> None:
    tenants = [
        msgspec.structs.replace(numbered("capped"), ceiling=0),
        msgspec.structs.replace(numbered("free"), ceiling=None),
    ]

    ceilings = [s for s in of_tenants(EngineStats(tenants=tenants)) if "ceiling_blocks" in s.name]

    assert [(s.labels["tenant"], s.value) for s in ceilings] == [("capped", 0.0)]


def test_a_thousand_tenants_are_a_bounded_number_of_series() -> None:
    tenants = [numbered(f"tenant {number}") for number in range(1000)]

    assert len(of_tenants(EngineStats(tenants=tenants))) <= 26 * 1000


def test_every_metric_has_its_own_help_text_and_counters_say_that_they_are() -> None:
    text = Metrics("base", FailoverStats()).render(EngineStats(tenants=[numbered("t")])).decode()
    families = [f for f in text_string_to_metric_families(text) if "cache_usage" not in f.name]

    helps = [family.documentation for family in families]
    assert all(" " in text and text[0].isupper() for text in helps)
    assert len(set(helps)) == len(helps)
    assert all(
        s.name.endswith("_total") for f in families if f.type == "counter" for s in f.samples
    )


def test_without_an_engine_only_its_own_numbers_are_missing() -> None:
    text = Metrics("base", FailoverStats()).render(None).decode()

    assert "vllm:time_to_first_token_seconds_count" in text
    assert "loraplex:request_moves_total" in text
    assert "loraplex:steps" not in text


@pytest.mark.anyio
async def test_the_times_of_a_choice_add_up() -> None:
    metrics = Metrics("base", FailoverStats())
    usage = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=0)
    events = some_events(
        TokenEvent(request_id="r", index=0, token_ids=[5], text="a", queue_seconds=QUEUED),
        TokenEvent(
            request_id="r",
            index=0,
            token_ids=[6],
            text="b",
            finish_reason=FinishReason.LENGTH,
            usage=usage,
        ),
    )

    async for _ in metrics.watch(one_prompt(), events):
        pass

    found = sums(metrics)
    queued, prefill = (found[f"request_{name}_time_seconds"] for name in ("queue", "prefill"))
    decode, both = (found[f"request_{name}_time_seconds"] for name in ("decode", "inference"))
    assert queued == QUEUED
    assert queued + prefill == pytest.approx(found["time_to_first_token_seconds"])
    assert prefill + decode == pytest.approx(both)
    assert found["request_max_num_generation_tokens"] == 2


def sums(metrics: Metrics) -> dict[str, float]:
    """The sum of each histogram, under vLLM's names."""
    families = text_string_to_metric_families(metrics.render(None).decode())
    samples = [sample for family in families for sample in family.samples]
    return {
        sample.name.removeprefix("vllm:").removesuffix("_sum"): sample.value
        for sample in samples
        if sample.name.endswith("_sum")
    }


def one_prompt() -> Generation:
    request = GenerateRequest(
        request_id="r",
        tenant="t",
        namespace="n",
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=2),
    )
    tokenizer = Tokenizer(word_tokenizer(), {}, {})
    return Generation("r", 0, "base", [Prompt([1, 2, 3], "")], [request], tokenizer, "fp")


async def some_events(*events: TokenEvent) -> AsyncGenerator[ChoiceEvent, None]:
    await asyncio.sleep(2 * QUEUED)
    for event in events:
        yield ChoiceEvent(0, 0, event)
