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
from gpu.timing import Unrecordable, twice
from triton.runtime.errors import OutOfResources

BROKEN = 3  # exit status: the GPU is of no more use to this process; another one can go on
HOT = 120e6  # bytes: fewer lie in the largest cache, and are not read from memory again
_TIME_IS_UP = "time is up"


def run(
    group: str, records: Records, interpreted: bool, seconds: float, device: str | None = None
) -> int:
    """Records every case of a group behind those that are recorded; none begins when so many
    seconds have passed.

    Args:
        interpreted: with tiny shapes, nothing being timed.
        device: None: the CPU where `interpreted`, else the GPU.

    Returns:
        The status to exit with.
    """
    end = time.monotonic() + seconds
    torch.manual_seed(0)
    device = device or ("cpu" if interpreted else "cuda")
    machine = Machine(torch.device(device), _measured(records), interpreted)
    done = sum(record["group"] == group for record in records.all())
    try:
        with torch.inference_mode():
            for index, item in enumerate(make_cases(group, machine)):
                if index < done:
                    continue
                facts = dict(item.facts) if isinstance(item, Fact) else {}
                if isinstance(item, Case):
                    facts = _outcome(item, machine.ceilings)
                is_broken = facts.pop("is_broken", False)
                records.add(group, item.name, **facts)
                if is_broken:
                    return BROKEN
                if time.monotonic() > end:
                    records.add(group, _TIME_IS_UP, ok=False, why="what follows was not run")
                    return 0
    except Exception as error:  # while a case was made, or outside of all cases
        records.add(group, "broke off", ok=False, why=_first_line(error), trace=_trace())
    return 0


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
    except Exception as error:  # Triton's own errors derive from nothing else
        if case.may_not_fit and isinstance(error, OutOfResources):
            return {"why": _first_line(error)}
        facts = {"ok": False, "why": _first_line(error), "trace": _trace()}
        facts["is_broken"] = is_fatal(error)
    return facts | {"wall": round(time.perf_counter() - start, 2)}


def is_fatal(error: Exception) -> bool:
    """Whether all that a process asks of the GPU fails from now on."""
    accelerator_error = getattr(torch, "AcceleratorError", ())
    return isinstance(error, (Unrecordable, accelerator_error)) or "CUDA error" in str(error)


def _time(timed: Timed, ceilings: Ceilings) -> dict[str, Any]:
    seconds, spread = twice(timed.run)
    seconds /= timed.times
    facts: dict[str, Any] = {
        "seconds": seconds,
        "spread": spread,
        "copy_share": timed.num_bytes / seconds / ceilings.copy,
        "matmul_share": timed.flops / seconds / ceilings.matmul,
    }
    facts |= _goal(timed, seconds, ceilings) if timed.goal is not None else {}
    facts["peers"] = {}
    for name, run in timed.peers.items():
        facts["peers"][name], is_broken = _peer(run, timed.times)
        if is_broken:
            return facts | {"is_broken": True}
    return facts


def _goal(timed: Timed, seconds: float, ceilings: Ceilings) -> dict[str, Any]:
    """What is read from a cache, or takes no longer than a launch, tells nothing of memory."""
    assert timed.goal is not None
    goal = timed.goal.seconds(timed.num_bytes, timed.flops, ceilings)
    by_bytes = timed.num_bytes / ceilings.copy >= timed.flops / ceilings.matmul
    if by_bytes and timed.goal.at_most is None and timed.num_bytes * timed.times < HOT:
        return {"goal": goal, "is_hot": True}
    return {"goal": goal, "met": seconds <= goal}


def _peer(run: Callable[[], object], times: int) -> tuple[float | str, bool]:
    """-> its seconds, or why it cannot do this; and whether it broke the GPU's state."""
    try:
        return twice(run)[0] / times, False
    except Exception as error:
        return _first_line(error).partition(".")[0], is_fatal(error)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _trace() -> str:
    return traceback.format_exc()
