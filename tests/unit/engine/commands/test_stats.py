"""What the counters say is what was computed."""

import pytest
from support.clocks import FakeClock
from support.engine.kv import FULL
from support.engine.preempting import preempt_all
from support.engine.scheduling import SchedulerHarness, Setup, generate_request

from loraplex.adapters.manifest import AdapterStats
from loraplex.engine.commands.stats import WASTE_EVERY, StepMetrics
from loraplex.engine.kv.metering import Metering
from loraplex.engine.protocol import EngineStats

NO_ADAPTERS = AdapterStats(
    registered=0, resident=0, slots=2, loads=0, evictions=0, references=0, host_bytes=0
)
PROMPT = list(range(1, 10))


class MeteredHarness(SchedulerHarness):
    """Counts each step as the engine does."""

    def __init__(self, setup: Setup | None = None) -> None:
        super().__init__(setup)
        self.metrics = StepMetrics()

    def counted_step(self) -> None:
        output = self.scheduler.schedule()
        updates = self.scheduler.update(output, self.model.execute(output.step))
        self.metrics.count(output, updates, self.kv)

    def counted_run(self) -> EngineStats:
        while self.scheduler.running or self.scheduler.waiting:
            self.counted_step()
        return self.stats()

    def stats(self) -> EngineStats:
        return self.metrics.stats(self.scheduler, NO_ADAPTERS)


def test_prompts_and_generated_tokens_are_counted_once() -> None:
    harness = MeteredHarness(Setup(max_num_batched_tokens=4, max_num_seqs=4))
    harness.add(generate_request("r", PROMPT, n=2, max_tokens=3, ignore_eos=True))

    stats = harness.counted_run()

    assert (stats.prompt_tokens, stats.computed_prompt_tokens) == (9, 9)
    assert (stats.generation_tokens, stats.num_steps) == (6, 5)


def test_a_cached_prefix_is_counted_as_hit_and_not_as_computed() -> None:
    harness = MeteredHarness()
    for name in ("cold", "warm"):
        harness.add(generate_request(name, PROMPT, max_tokens=1))
        stats = harness.counted_run()

    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (18, 8)
    assert (stats.cached_prompt_tokens, stats.computed_prompt_tokens) == (8, 10)


def test_gauges_tell_of_now() -> None:
    harness = MeteredHarness(Setup(max_num_seqs=1))
    for name in ("running", "waiting"):
        harness.add(generate_request(name, PROMPT, max_tokens=5))
    harness.counted_step()

    stats = harness.stats()

    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert stats.num_blocks - stats.num_free_blocks == 6
    assert (stats.allocated_slots, stats.used_slots) == (24, 18)


def test_an_idle_engine_holds_nothing_and_remembers_prefixes() -> None:
    harness = MeteredHarness()
    harness.add(generate_request("r", PROMPT, max_tokens=1))

    stats = harness.counted_run()

    assert (stats.allocated_slots, stats.num_free_blocks) == (0, stats.num_blocks)
    assert stats.num_cached_blocks == 4


def test_waste_is_measured_where_there_is_something_to_waste() -> None:
    busy, tiny = MeteredHarness(), MeteredHarness(Setup(groups=FULL))
    busy.add(generate_request("r", PROMPT * 4, max_tokens=WASTE_EVERY + 1, ignore_eos=True))
    tiny.add(generate_request("r", [1, 2], max_tokens=WASTE_EVERY + 1, ignore_eos=True))

    waste = busy.counted_run()

    assert waste.peak_waste == waste.mean_waste == pytest.approx(waste_of(36 + WASTE_EVERY - 1))
    assert tiny.counted_run().peak_waste == 0.0


def waste_of(num_tokens: int) -> float:
    """Of one sequence in blocks of four, in a full group and in one with a window of six."""
    last = 4 * -(-num_tokens // 4)
    first_in_window = (num_tokens - 6) // 4 * 4
    allocated = last + last - first_in_window
    return 2 * (last - num_tokens) / allocated


def test_tenants_are_told_apart_with_what_they_run_and_wait_for() -> None:
    harness = MeteredHarness(Setup(max_num_seqs=1))
    for tenant in ("one", "two"):
        harness.add(generate_request(tenant, PROMPT, tenant=tenant, max_tokens=5))
    harness.counted_step()

    one, two = harness.stats().tenants

    assert (one.tenant, one.num_running, one.num_waiting, one.held_blocks) == ("one", 1, 0, 6)
    assert (two.tenant, two.num_running, two.num_waiting, two.held_blocks) == ("two", 0, 1, 0)
    assert (one.num_queued, two.num_queued) == (1, 0)


def test_a_request_has_waited_until_it_first_began_however_often_it_is_sent_back() -> None:
    clock, harness = FakeClock(), MeteredHarness()
    harness.kv.pool.metering = Metering(clock)
    harness.add(generate_request("r", PROMPT, max_tokens=5, ignore_eos=True))
    clock.now += 2.0
    harness.counted_step()
    preempt_all(harness.scheduler)
    clock.now += 7.0
    (sequence,) = harness.scheduler.waiting

    *_, tenant = harness.counted_run().tenants

    assert (tenant.queue_seconds, tenant.num_queued, tenant.num_preemptions) == (2.0, 1, 1)
    assert sequence.queue_seconds == 2.0
