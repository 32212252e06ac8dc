"""Preemption at a moment that a test chooses."""

from loraplex.engine.scheduling.scheduler import Scheduler


def preempt_all(scheduler: Scheduler) -> None:
    """Preempts every running sequence; what is computed stays in the prefix cache."""
    for sequence in list(scheduler.running):
        scheduler._preempt(sequence)


def flush_cache(scheduler: Scheduler) -> None:
    """Evicts all that is cached on the device."""
    pool = scheduler.kv.pool
    pool.release([pool.allocate("other") for _ in range(pool.num_available("other"))])
