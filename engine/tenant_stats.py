"""TenantStats: what each account has of the engine, put together from those who keep the books."""

from collections import Counter

from loraplex.engine.protocol import TenantStats
from loraplex.engine.scheduler import Scheduler


def tenant_stats(scheduler: Scheduler) -> list[TenantStats]:
    """One entry for each account that was heard of, the operator's included, by name."""
    pool = scheduler.kv.pool
    running = Counter(sequence.tenant for sequence in scheduler.running)
    waiting: Counter[str] = Counter()
    for (tenant, _), line in scheduler.waiting.lines.items():
        waiting[tenant] += len(line)
    swapped = scheduler.kv.tiers.bytes_by_account()
    names = {account.name for account in pool.budgets.accounts} | running.keys() | waiting.keys()
    now = pool.metering.now()
    stats = []
    for name in sorted(names | swapped.keys()):
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
                swapped_out_bytes=meter.swapped_out_bytes,
                swapped_in_bytes=meter.swapped_in_bytes,
                swap_bytes=swapped.get(name, 0),
                prefill_tokens=service.prefill_tokens,
                decode_tokens=service.decode_tokens,
                adapter_load_bytes=service.loaded_bytes,
                service=service.counter,
            )
        )
    return stats
