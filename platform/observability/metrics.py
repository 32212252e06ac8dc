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

SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 80)
LONG = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKENS = tuple(unit * 10**power for power in range(6) for unit in (1, 2, 5))
CHOICES = (1, 2, 5, 10, 20)
LABEL = "model_name"

# Created-metrics would double the series, to say only when this process started.
disable_created_metrics()  # type: ignore[no-untyped-call]

GAUGES = {
    "vllm:num_requests_running": ("num_running", "Number of running sequences"),
    "vllm:num_requests_waiting": ("num_waiting", "Number of waiting sequences"),
    "loraplex:kv_blocks": ("num_blocks", "Number of KV blocks in the pool"),
    "loraplex:kv_blocks_free": (
        "num_free_blocks",
        "Number of free KV blocks, cached ones included",
    ),
    "loraplex:kv_blocks_cached": (
        "num_cached_blocks",
        "Number of free KV blocks that hold a cached prefix",
    ),
    "loraplex:kv_slots_allocated": (
        "allocated_slots",
        "Number of token slots in KV blocks held by sequences",
    ),
    "loraplex:kv_slots_used": (
        "used_slots",
        "Number of token slots in held KV blocks that hold a token",
    ),
    "loraplex:kv_waste_peak": ("peak_waste", "Peak share of allocated token slots that are unused"),
    "loraplex:kv_waste_mean": ("mean_waste", "Mean share of allocated token slots that are unused"),
    "loraplex:offload_host_bytes": ("offload.host_bytes", "Bytes of KV blocks in host memory"),
    "loraplex:offload_disk_bytes": ("offload.disk_bytes", "Bytes of KV blocks on disk"),
    "loraplex:adapters_registered": ("adapters.registered", "Number of registered adapters"),
    "loraplex:adapters_resident": (
        "adapters.resident",
        "Number of adapters resident in a device slot",
    ),
    "loraplex:adapter_slots": ("adapters.slots", "Number of adapter slots on the device"),
    "loraplex:adapter_references": (
        "adapters.references",
        "Number of sequences that hold an adapter slot",
    ),
}
COUNTERS = {
    "vllm:prompt_tokens": ("prompt_tokens", "Number of prompt tokens"),
    "vllm:generation_tokens": ("generation_tokens", "Number of generated tokens"),
    "vllm:prefix_cache_queries": (
        "prefix_cache_queries",
        "Number of prompt tokens looked up in the prefix cache",
    ),
    "vllm:prefix_cache_hits": (
        "prefix_cache_hits",
        "Number of prompt tokens found in the prefix cache",
    ),
    "vllm:num_preemptions": ("num_preemptions", "Number of preempted sequences"),
    "loraplex:prompt_tokens_computed": (
        "computed_prompt_tokens",
        "Number of prompt tokens computed",
    ),
    "loraplex:steps": ("num_steps", "Number of engine steps"),
    "loraplex:steps_replayed": (
        "num_replayed_steps",
        "Number of engine steps replayed from a recording",
    ),
    "loraplex:kv_blocks_copied": ("copied_blocks", "Number of KV blocks copied on write"),
    "loraplex:offload_out_bytes": (
        "offload.out_bytes",
        "Bytes of KV blocks moved from the device to host memory",
    ),
    "loraplex:offload_in_bytes": (
        "offload.in_bytes",
        "Bytes of KV blocks moved from host memory to the device",
    ),
    "loraplex:offload_written_bytes": (
        "offload.written_bytes",
        "Bytes of KV blocks written to the disk tier",
    ),
    "loraplex:offload_read_bytes": (
        "offload.read_bytes",
        "Bytes of KV blocks read from the disk tier",
    ),
    "loraplex:offload_host_hits": ("offload.host_hits", "Number of KV blocks found in host memory"),
    "loraplex:offload_disk_hits": (
        "offload.disk_hits",
        "Number of KV blocks found in the disk tier",
    ),
    "loraplex:offload_dropped_blocks": (
        "offload.dropped_blocks",
        "Number of evicted KV blocks that no tier kept",
    ),
    "loraplex:offload_discarded_blocks": (
        "offload.discarded_blocks",
        "Number of damaged KV blocks discarded from the disk tier",
    ),
    "loraplex:base_prompt_saved_tokens": (
        "base_prompt_saved_tokens",
        "Number of prompt tokens that base prompts saved computing",
    ),
    "loraplex:adapter_loads": ("adapters.loads", "Number of adapter loads into host memory"),
    "loraplex:adapter_evictions": (
        "adapters.evictions",
        "Number of adapters evicted from a device slot",
    ),
}
FAILOVER_COUNTERS = {
    "loraplex:request_moves": (
        "moves",
        "Number of times that a request continued in another engine after its own had ended",
    ),
    "loraplex:requests_quarantined": (
        "quarantined",
        "Number of requests refused because two engines ended while running them",
    ),
}
BASE_PROMPT_GAUGES = {
    "loraplex:base_prompt_blocks": "Number of KV blocks pinned by a base prompt",
    "loraplex:base_prompt_users": "Number of sequences that use a base prompt",
    "loraplex:base_prompt_saved_blocks": "Number of KV blocks saved by sharing a base prompt",
}
TENANT_GAUGES = {
    "floor_blocks": ("floor", "Guaranteed number of KV blocks of a tenant"),
    "ceiling_blocks": ("ceiling", "Maximum number of KV blocks of a tenant, if it has a ceiling"),
    "weight": ("weight", "Weight of a tenant in the sharing of service"),
    "kv_blocks_held": ("held_blocks", "Number of KV blocks in use that are charged to a tenant"),
    "kv_blocks_cached": (
        "cached_blocks",
        "Number of free KV blocks that hold a cached prefix of a tenant",
    ),
    "sequences_running": ("num_running", "Number of running sequences of a tenant"),
    "sequences_waiting": ("num_waiting", "Number of waiting sequences of a tenant"),
    "offload_bytes": ("offload_bytes", "Bytes of KV blocks of a tenant in host memory and on disk"),
    "service": ("service", "Virtual token counter of a tenant"),
}
TENANT_COUNTERS = {
    "private_block_seconds": (
        "private_block_seconds",
        "Block-seconds of KV blocks charged to a tenant and used by one sequence",
    ),
    "shared_block_seconds": (
        "shared_block_seconds",
        "Block-seconds of KV blocks charged to a tenant and used by several sequences",
    ),
    "saved_block_seconds": (
        "saved_block_seconds",
        "Block-seconds of KV blocks that a tenant uses uncharged",
    ),
    "cached_block_seconds": (
        "cached_block_seconds",
        "Block-seconds of cached KV blocks of a tenant",
    ),
    "preemptions": ("num_preemptions", "Number of preempted sequences of a tenant"),
    "queue_seconds": (
        "queue_seconds",
        "Time from arrival to first admission of the requests of a tenant, in seconds",
    ),
    "queued": ("num_queued", "Number of admitted requests of a tenant"),
    "offloaded_bytes": (
        "offloaded_bytes",
        "Bytes of KV blocks of a tenant moved from the device to host memory",
    ),
    "fetched_bytes": (
        "fetched_bytes",
        "Bytes of KV blocks of a tenant moved from host memory to the device",
    ),
    "prefill_tokens": ("prefill_tokens", "Number of prompt tokens computed for a tenant"),
    "decode_tokens": ("decode_tokens", "Number of tokens generated for a tenant"),
    "adapter_load_bytes": (
        "adapter_load_bytes",
        "Bytes of adapters placed into device slots for a tenant",
    ),
}


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
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Time from a request to its first token", SHORT
        )
        self._per_token = self._histogram(
            "time_per_output_token_seconds", "Time of a request per generated token", SHORT
        )
        self._between_tokens = self._histogram(
            "inter_token_latency_seconds", "Time from one token to the next", SHORT
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "Time from a request to its last token", LONG
        )
        self._queueing = self._histogram(
            "request_queue_time_seconds", "Time from a choice's arrival to its admission", LONG
        )
        self._prefilling = self._histogram(
            "request_prefill_time_seconds",
            "Time from a choice's admission to its first token",
            LONG,
        )
        self._running = self._histogram(
            "request_inference_time_seconds",
            "Time from a choice's admission to its last token",
            LONG,
        )
        self._decoding = self._histogram(
            "request_decode_time_seconds", "Time from a choice's first token to its last", LONG
        )
        self._prompt_tokens = self._histogram(
            "request_prompt_tokens", "Number of prompt tokens of a request", TOKENS
        )
        self._generated_tokens = self._histogram(
            "request_generation_tokens", "Number of tokens generated for a choice", TOKENS
        )
        self._longest_choice = self._histogram(
            "request_max_num_generation_tokens",
            "Number of tokens generated for the longest choice of a request",
            TOKENS,
        )
        self._max_tokens = self._histogram(
            "request_params_max_tokens", "Value of max_tokens in requests that have one", TOKENS
        )
        self._num_choices = self._histogram(
            "request_params_n", "Number of choices that a request asks for", CHOICES
        )
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
                self._longest_choice.observe(length)
            if num_choices:
                self._finished.labels(self._model_name, outcome).inc(num_choices)

    def _note_request(self, generation: Generation) -> None:
        for prompt, request in zip(generation.prompts, generation.requests, strict=True):
            self._prompt_tokens.observe(len(prompt.token_ids))
            self._num_choices.observe(request.sampling.n)
            if request.sampling.max_tokens is not None:
                self._max_tokens.observe(request.sampling.max_tokens)

    def _note(self, item: ChoiceEvent, times: "_Times", longest: Counts[int]) -> None:
        now, event = time.monotonic(), item.event
        if item.choice not in times.latest:
            self._note_first(item, now, times)
        elif event.token_ids:
            self._between_tokens.observe((now - times.latest[item.choice]) / len(event.token_ids))
        times.latest[item.choice] = now
        if event.finish_reason is not None:
            self._finished.labels(self._model_name, event.finish_reason.value).inc()
            self._whole.observe(now - times.start)
            self._decoding.observe(now - times.first[item.choice])
            self._running.observe(now - times.admitted[item.choice])
        if event.usage is not None:
            num_tokens = event.usage.completion_tokens
            longest[item.prompt] = max(longest[item.prompt], num_tokens)
            self._generated_tokens.observe(num_tokens)
            self._per_token.observe((now - times.start) / max(1, num_tokens))

    def _note_first(self, item: ChoiceEvent, now: float, times: "_Times") -> None:
        queued = item.event.queue_seconds or 0.0
        admitted = min(times.start + queued, now)
        times.first[item.choice], times.admitted[item.choice] = now, admitted
        self._first_token.observe(now - times.start)
        self._queueing.observe(queued)
        self._prefilling.observe(now - admitted)

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
