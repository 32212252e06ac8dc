"""Seconds of GPU work."""

from collections.abc import Callable

import triton


class Unrecordable(Exception):
    """What runs by itself failed within a recording, which may have left the GPU in its middle."""


REP_MS = 20  # of work in a recorded graph, which is replayed ten times for one figure


def seconds(run: Callable[[], object]) -> float:
    """The median of `run`, replayed from a graph, so that no launch is waited for.

    What `run` reads is cold only where it is more than the L2 cache holds.
    """
    run()  # compiles; within a recording nothing can be loaded
    try:
        median = triton.testing.do_bench_cudagraph(run, rep=REP_MS, return_mode="median")
    except Exception as error:
        raise Unrecordable(str(error)) from error
    return float(median) / 1e3


def twice(run: Callable[[], object]) -> tuple[float, float]:
    """-> (seconds, spread: how far two figures lie apart, as a share of the smaller)"""
    a, b = seconds(run), seconds(run)
    return min(a, b), abs(a - b) / min(a, b)
