"""Seconds of GPU work."""

from collections.abc import Callable

import triton

REP_MS = 60  # of measuring, for one figure
_SMALL = 2e-4  # seconds; what is shorter is replayed from a graph, so that no launch is waited for


def seconds(run: Callable[[], object]) -> float:
    """The median of `run`. Long ones begin with an empty L2 cache; short ones are replayed."""
    once = float(triton.testing.do_bench(run, warmup=10, rep=20, return_mode="median")) / 1e3
    if once < _SMALL:
        return float(triton.testing.do_bench_cudagraph(run, rep=REP_MS)) / 1e3
    return float(triton.testing.do_bench(run, warmup=10, rep=REP_MS, return_mode="median")) / 1e3


def twice(run: Callable[[], object]) -> tuple[float, float]:
    """-> (seconds, spread: how far two figures lie apart, as a share of the smaller)"""
    a, b = seconds(run), seconds(run)
    return min(a, b), abs(a - b) / min(a, b)
