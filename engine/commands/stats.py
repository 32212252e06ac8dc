"""Builds the engine's statistics from the counters of its parts."""

from collections import Counter

from loraplex.adapters.manifest import AdapterStats
from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.protocol import EngineStats, TenantStats
from loraplex.engine.scheduling.scheduler import Scheduler, SchedulerOutput, SequenceUpdate


def tenant_stats(scheduler: Scheduler) -> list[TenantStats]:
    """Returns one entry for each known account, the operator's included, by name."""
    pool = scheduler.kv.pool
    running = Counter(sequence.tenant for sequence in scheduler.running)
    waiting: Counter[str] = Counter()
    for (tenant, _), queue in scheduler.waiting.queues.items():
        waiting[tenant] += len(queue)
    offloaded = scheduler.kv.tiers.bytes_by_account()
    names = {account.name for account in pool.budgets.accounts} | running.keys() | waiting.keys()
    now = pool.metering.now()
    stats = []
    for name in sorted(names | offloaded.keys()):
        account, meter = pool.budgets.of(name), pool.metering.of(name)
        service = scheduler.policy.ledger.of(name)
        stats.append(
            TenantStats(
                tenant=name,
                floor=account.floor,
                ceiling=account.ceiling,
                weight=service.weight,
                held_blocks=account.held,
                cached_blocks=account.cached,
                num_running=running[name],
                num_waiting=waiting[name],
                private_block_seconds=meter.private.at(now),
                shared_block_seconds=meter.shared.at(now),
                saved_block_seconds=meter.saved.at(now),
                cached_block_seconds=meter.cached.at(now),
                evictions={cause.value: count for cause, count in meter.evictions.items()},
                num_preemptions=meter.num_preemptions,
                queue_seconds=meter.queue_seconds,
                num_queued=meter.num_queued,
                offloaded_bytes=meter.offloaded_bytes,
                fetched_bytes=meter.fetched_bytes,
                offload_bytes=offloaded.get(name, 0),
                prefill_tokens=service.prefill_tokens,
                decode_tokens=service.decode_tokens,
                adapter_load_bytes=service.loaded_bytes,
                service=service.counter,
            )
        )
    return stats


WASTE_EVERY = 13  # steps between two looks; prime to the block, or all looks see one phase of it
WASTE_BLOCKS = 8  # fewer held blocks say nothing: a lone short sequence is mostly waste


class StepMetrics:
    def __init__(self) -> None:
        self._num_steps = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._computed_prompt_tokens = 0
        self._generation_tokens = 0
        self._waste_sum = 0.0
        self._waste_count = 0
        self._waste_peak = 0.0

    def count(
        self, output: SchedulerOutput, updates: list[SequenceUpdate], kv: KVCacheManager
    ) -> None:
        """Counts one step, after its update."""
        if not output.scheduled:
            return
        self._num_steps += 1
        self._generation_tokens += len(updates)
        for item in output.scheduled:
            start = item.sequence.num_computed_tokens - item.num_tokens
            in_prompt = max(0, item.sequence.num_prompt_tokens - start)
            self._computed_prompt_tokens += min(item.num_tokens, in_prompt)
        for update in updates:
            if update.position == 0 and update.sequence.index == 0:
                self._prompt_tokens += update.sequence.num_prompt_tokens
                self._cached_tokens += update.sequence.num_cached_tokens or 0
        if self._num_steps % WASTE_EVERY == 0:
            self._measure_waste(kv)

    def _measure_waste(self, kv: KVCacheManager) -> None:
        allocated, used = kv.slots()
        if allocated >= WASTE_BLOCKS * kv.block_size:
            waste = (allocated - used) / allocated
            self._waste_sum += waste
            self._waste_count += 1
            self._waste_peak = max(self._waste_peak, waste)

    def stats(self, scheduler: Scheduler, adapters: AdapterStats) -> EngineStats:
        kv = scheduler.kv
        allocated, used = kv.slots()
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=kv.pool.num_blocks,
            num_free_blocks=kv.pool.num_free,
            num_cached_blocks=kv.pool.num_cached,
            allocated_slots=allocated,
            used_slots=used,
            block_size=kv.block_size,
            prompt_tokens=self._prompt_tokens,
            computed_prompt_tokens=self._computed_prompt_tokens,
            cached_prompt_tokens=self._cached_tokens,
            generation_tokens=self._generation_tokens,
            prefix_cache_queries=self._prompt_tokens,
            prefix_cache_hits=self._cached_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self._num_steps,
            copied_blocks=kv.num_copied_blocks,
            offload=kv.tiers.stats(),
            peak_waste=self._waste_peak,
            mean_waste=self._waste_sum / self._waste_count if self._waste_count else 0.0,
            tenants=tenant_stats(scheduler),
            adapters=adapters,
        )
