"""Checks and times everything that runs on a GPU: one command, ten minutes at most.

    python benchmarks/gpu_check.py [--json FILE] [--only GROUP …] [--budget SECONDS]
    python benchmarks/gpu_check.py --only steps sweep sanitizer      a second run: the rest
    python benchmarks/gpu_check.py --interpret      every group on tiny shapes, without a GPU

Run from a checkout; nothing of it needs to be installed. Kernels need PyTorch and Triton alone; the
groups of the engine need what it imports, and say what is missing. Exit status 1 where a result is
wrong or a group was not run; a goal that is missed is reported, and fails nothing.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks"), str(ROOT / "tests")]

from gpu.groups import GROUPS  # noqa: E402
from gpu.record import Records  # noqa: E402
from gpu.table import table  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
BUDGET = 520  # seconds
GRACE = 30  # seconds that a group may take to end after its deadline
BUILD = 300  # seconds that the native kernels may take to build, before the budget begins
BROKEN = 3  # as in `gpu.child`


def main() -> int:
    options = _options()
    if options.child:
        return _child(options)
    if not options.interpret and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device; --interpret runs everything on tiny shapes without")
    options.json = options.json or _default_file(options.interpret)
    records = Records(options.json)
    records.write({"interpreted": options.interpret, "records": []})
    _build_native(records)
    start = time.monotonic()
    for name in dict.fromkeys(["ceilings", *_chosen(options)]):
        left = options.budget - (time.monotonic() - start)
        seconds = left if options.interpret else min(GROUPS[name].seconds, left)
        _run(name, seconds, records, options)
        print(table([r for r in records.all() if r["group"] == name]), end="\n\n", flush=True)
    found = records.all()
    options.json.with_suffix(".md").write_text(table(found) + "\n")
    wrong = [r for r in found if r.get("ok") is False]
    missed = [r for r in found if r.get("met") is False]
    took = time.monotonic() - start
    print(
        f"\n{len(found)} records in {took:.0f} s, {len(wrong)} wrong, {len(missed)} goals missed; "
        f"{options.json}"
    )
    return int(bool(wrong))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/gpu-DATE.json")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=GROUPS,
        metavar="GROUP",
        help=f"groups to run, of: {', '.join(GROUPS)}; default: all but {', '.join(_extra())}",
    )
    parser.add_argument(
        "--budget", type=float, default=BUDGET, help="seconds for all groups (default: %(default)s)"
    )
    parser.add_argument(
        "--interpret",
        action="store_true",
        help="run every group on tiny shapes in Triton's interpreter, without a GPU",
    )
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=GROUPS, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def _extra() -> list[str]:
    return [name for name, group in GROUPS.items() if not group.is_default]


def _chosen(options: argparse.Namespace) -> list[str]:
    if options.only or options.interpret:
        return options.only or list(GROUPS)
    return [name for name in GROUPS if name not in _extra()]


def _default_file(interpret: bool) -> Path:
    """Beside the other results, where it is one."""
    if interpret:
        return Path(tempfile.mkdtemp()) / "gpu_check.json"
    return RESULTS / f"gpu-{date.today()}.json"


def _run(group: str, seconds: float, records: Records, options: argparse.Namespace) -> None:
    """In a process of its own, whose end is waited for only so long."""
    missing = [name for name in GROUPS[group].needs if importlib.util.find_spec(name) is None]
    if missing:
        why = f"not installed: {', '.join(missing)}; put it on PYTHONPATH, or leave the group out"
        records.add(group, "not run", ok=False, why=why)
        return
    if seconds <= 0:
        records.add(group, "not run", ok=False, why="the budget is spent")
        return
    end = time.monotonic() + seconds
    status: int | str = BROKEN
    while status == BROKEN and time.monotonic() < end:  # one process after another
        status = _run_child(group, end - time.monotonic(), options)
    if status not in (0, BROKEN):
        records.add(group, "ended early", ok=False, why=f"the process ended with {status}")


def _run_child(group: str, seconds: float, options: argparse.Namespace) -> int | str:
    """-> its exit status, or what came before that."""
    command = [sys.executable, __file__, "--child", group, "--json", options.json]
    command += ["--deadline", str(seconds), *(["--interpret"] if options.interpret else [])]
    try:
        return subprocess.run(command, timeout=seconds + GRACE, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"more than {seconds + GRACE:.0f} s"


def _build_native(records: Records) -> None:
    """Host memory is copied by native kernels, whose first build is not to be timed."""
    script = "from loraplex.kernels.native.library import native; native()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=BUILD, check=False
    )
    lines = done.stderr.splitlines()
    why = lines[-1] if lines else f"ended with {done.returncode}"
    failed = {"why": why} if done.returncode else {}
    records.add("host", "native kernels", built=done.returncode == 0, **failed)


def _child(options: argparse.Namespace) -> int:
    if options.interpret:
        import support.kernels.triton_interpreter  # noqa: F401, PLC0415 - before anything imports Triton
    from gpu.child import run  # noqa: PLC0415

    device = "cuda" if options.tiny else None  # tiny shapes, but not in the interpreter
    is_tiny = options.interpret or options.tiny
    return run(options.child, Records(options.json), is_tiny, options.deadline, device)


if __name__ == "__main__":
    sys.exit(main())
