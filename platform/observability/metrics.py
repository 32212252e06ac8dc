"""Metrics for Prometheus, under vLLM's names where vLLM has the metric."""

import time
from collections import Counter as Counts
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from operator import attrgetter

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loraplex.engine.protocol import BasePromptStats, EngineStats, FinishReason, TenantStats
from loraplex.platform.engines.failover import FailoverStats
from loraplex.platform.inference.generation import ChoiceEvent, Generation
from loraplex.platform.observability.tables import (
    BASE_PROMPT_GAUGES,
    COUNTERS,
    FAILOVER_COUNTERS,
    GAUGES,
    HISTOGRAMS,
    TENANT_COUNTERS,
    TENANT_GAUGES,
)

LABEL = "model_name"

# Created-metrics would double the series, to say only when this process started.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """Measures requests as this process sees them, beside the engine's own statistics."""

    def __init__(self, model_name: str, failover: FailoverStats) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(model_name)
        self._registry.register(self._engine)
        self._registry.register(_FailoverCollector(model_name, failover))
        self._finished = Counter(
            "vllm:request_success",
            "Number of finished choices, by reason",
            [LABEL, "finished_reason"],
            registry=self._registry,
        )
        self._histograms = {
            name: self._histogram(name, text, buckets)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self.num_active = 0  # requests being answered

    def render(self, stats: EngineStats | None) -> bytes:
        """Returns Prometheus text. `stats` is None while no engine can be asked."""
        self._engine.stats = stats
        return generate_latest(self._registry)

    async def watch(
        self, generation: Generation, events: AsyncGenerator[ChoiceEvent, None]
    ) -> AsyncGenerator[ChoiceEvent, None]:
        """Yields the events unchanged, and measures their times."""
        times = _Times(time.monotonic())
        num_choices = len(generation.requests) * generation.choices_per_prompt
        longest: Counts[int] = Counts()  # by prompt
        outcome = FinishReason.ABORT.value
        self._note_request(generation)
        self.num_active += 1
        try:
            async with aclosing(events):
                async for item in events:
                    self._note(item, times, longest)
                    num_choices -= item.event.finish_reason is not None
                    yield item
        except Exception:
            outcome = "error"
            raise
        finally:
            self.num_active -= 1
            for length in longest.values():
                self._observe("request_max_num_generation_tokens", length)
            if num_choices:
                self._finished.labels(self._model_name, outcome).inc(num_choices)

    def _note_request(self, generation: Generation) -> None:
        for prompt, request in zip(generation.prompts, generation.requests, strict=True):
            self._observe("request_prompt_tokens", len(prompt.token_ids))
            self._observe("request_params_n", request.sampling.n)
            if request.sampling.max_tokens is not None:
                self._observe("request_params_max_tokens", request.sampling.max_tokens)

    def _note(self, item: ChoiceEvent, times: "_Times", longest: Counts[int]) -> None:
        now, event = time.monotonic(), item.event
        if item.choice not in times.latest:
            self._note_first(item, now, times)
        elif event.token_ids:
            self._observe(
                "inter_token_latency_seconds",
                (now - times.latest[item.choice]) / len(event.token_ids),
            )
        times.latest[item.choice] = now
        if event.finish_reason is not None:
            self._finished.labels(self._model_name, event.finish_reason.value).inc()
            self._observe("e2e_request_latency_seconds", now - times.start)
            self._observe("request_decode_time_seconds", now - times.first[item.choice])
            self._observe("request_inference_time_seconds", now - times.admitted[item.choice])
        if event.usage is not None:
            num_tokens = event.usage.completion_tokens
            longest[item.prompt] = max(longest[item.prompt], num_tokens)
            self._observe("request_generation_tokens", num_tokens)
            self._observe("time_per_output_token_seconds", (now - times.start) / max(1, num_tokens))

    def _note_first(self, item: ChoiceEvent, now: float, times: "_Times") -> None:
        queued = item.event.queue_seconds or 0.0
        admitted = min(times.start + queued, now)
        times.first[item.choice], times.admitted[item.choice] = now, admitted
        self._observe("time_to_first_token_seconds", now - times.start)
        self._observe("request_queue_time_seconds", queued)
        self._observe("request_prefill_time_seconds", now - admitted)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"vllm:{name}", text, [LABEL], buckets=buckets, registry=self._registry)
        return family.labels(self._model_name)


@dataclass
class _Times:
    """When a call started, and when its choices were admitted and produced tokens; in seconds."""

    start: float
    admitted: dict[int, float] = field(default_factory=dict)
    first: dict[int, float] = field(default_factory=dict)
    latest: dict[int, float] = field(default_factory=dict)


class _FailoverCollector(Collector):
    """This process's own counters, which continue when an engine ends."""

    def __init__(self, model_name: str, stats: FailoverStats) -> None:
        self._stats = stats
        self._labels = [model_name]

    def collect(self) -> Iterator[Metric]:
        for name, (attribute, text) in FAILOVER_COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=[LABEL])
            counter.add_metric(self._labels, getattr(self._stats, attribute))
            yield counter


class _EngineCollector(Collector):
    """The engine's statistics, whose counters restart with each engine."""

    def __init__(self, model_name: str) -> None:
        self.stats: EngineStats | None = None
        self._labels = [model_name]

    def collect(self) -> Iterator[Metric]:
        if (stats := self.stats) is None:
            return
        for name, (path, text) in GAUGES.items():
            yield self._gauge(name, text, attrgetter(path)(stats))
        for name, (path, text) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=[LABEL])
            counter.add_metric(self._labels, attrgetter(path)(stats))
            yield counter
        held = stats.num_blocks - stats.num_free_blocks
        usage = held / stats.num_blocks if stats.num_blocks else 0.0
        for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
            yield self._gauge(name, "Share of KV blocks in use, from 0 to 1", usage)

        yield from self._base_prompts(stats.base_prompts)
        yield from self._tenants(stats.tenants)

    def _base_prompts(self, prompts: list[BasePromptStats]) -> Iterator[Metric]:
        labels = [LABEL, "base_prompt", "version"]
        families = [
            GaugeMetricFamily(name, text, labels=labels)
            for name, text in BASE_PROMPT_GAUGES.items()
        ]
        for prompt in prompts:
            ref = prompt.info.ref
            values = (prompt.info.num_blocks, prompt.num_users, prompt.num_saved_blocks)
            for family, value in zip(families, values, strict=True):
                family.add_metric([*self._labels, ref.prompt_id, str(ref.version)], value)
        yield from families

    def _tenants(self, tenants: list[TenantStats]) -> Iterator[Metric]:
        labels = [LABEL, "tenant"]
        for kinds, kind in (
            (TENANT_GAUGES, GaugeMetricFamily),
            (TENANT_COUNTERS, CounterMetricFamily),
        ):
            for name, (path, text) in kinds.items():
                family = kind(f"loraplex:tenant_{name}", text, labels=labels)
                for tenant in tenants:
                    if (value := getattr(tenant, path)) is not None:
                        family.add_metric([*self._labels, tenant.tenant], value)
                yield family
        evictions = CounterMetricFamily(
            "loraplex:tenant_evictions",
            "Number of cached KV blocks evicted from a tenant, by cause",
            labels=[*labels, "cause"],
        )
        for tenant in tenants:
            for cause, count in tenant.evictions.items():
                evictions.add_metric([*self._labels, tenant.tenant, cause], count)
        yield evictions

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, text, labels=[LABEL])
        gauge.add_metric(self._labels, value)
        return gauge
