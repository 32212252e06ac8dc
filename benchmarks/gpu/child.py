"""One group of cases in one process: a fault on the GPU ends this group and no other."""

import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from gpu.case import Case, Ceilings, Fact, Machine, Timed
from gpu.groups import make_cases
from gpu.judge import judge
from gpu.record import Records
from gpu.timing import twice


def run(group: str, records: Records, interpreted: bool, seconds: float) -> None:
    """Records every case of a group; none begins when so many seconds have passed."""
    end = time.monotonic() + seconds
    torch.manual_seed(0)
    machine = Machine(
        torch.device("cpu" if interpreted else "cuda"), _measured(records), interpreted
    )
    with torch.inference_mode():
        for item in make_cases(group, machine):
            if isinstance(item, Fact):
                records.add(group, item.name, **item.facts)
            else:
                records.add(group, item.name, **_outcome(item, machine.ceilings))
            if time.monotonic() > end:
                records.add(group, "time is up", ok=False, why="what follows was not run")
                return


def _measured(records: Records) -> Ceilings | None:
    for record in records.all():
        if record["group"] == "ceilings" and record["case"] == "measured":
            return Ceilings(record["copy"], record["read"], record["matmul"])
    return None


def _outcome(case: Case, ceilings: Ceilings | None) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        facts = asdict(judge(case)) | {"floor": case.floor}
        if case.timed is not None and ceilings is not None:
            facts |= _time(case.timed, ceilings)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        facts = {"ok": False, "why": str(error), "trace": traceback.format_exc()}
    return facts | {"wall": round(time.perf_counter() - start, 2)}


def _time(timed: Timed, ceilings: Ceilings) -> dict[str, Any]:
    seconds, spread = twice(timed.run)
    seconds /= timed.times
    facts: dict[str, Any] = {
        "seconds": seconds,
        "spread": spread,
        "copy_share": timed.num_bytes / seconds / ceilings.copy,
        "matmul_share": timed.flops / seconds / ceilings.matmul,
        "peers": {name: _peer(run, timed.times) for name, run in timed.peers.items()},
    }
    if timed.goal is not None:
        facts["goal"] = timed.goal.seconds(timed.num_bytes, timed.flops, ceilings)
        facts["met"] = seconds <= facts["goal"]
    return facts


def _peer(run: Callable[[], object], times: int) -> float | str:
    """Its seconds, or why it cannot do this."""
    try:
        return twice(run)[0] / times
    except RuntimeError as error:
        return str(error).partition("\n")[0].partition(".")[0]
