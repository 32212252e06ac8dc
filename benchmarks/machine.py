"""What a number was measured on, and how quiet it was there."""

import platform
import re
import resource
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

PACKAGES = ("loraplex", "torch", "transformers", "peft", "triton")


def describe() -> dict[str, object]:
    return {
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    return found.group(1) if found else platform.processor()


def versions(vllm_python: Path | None) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if vllm_python:
        script = "import vllm, torch; print(vllm.__version__, '(torch', torch.__version__ + ')')"
        command = [str(vllm_python), "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found["vllm"] = done.stdout.splitlines()[-1] if done.stdout else "not importable"
    return found


def commit() -> str:
    """The short commit, with a mark when the tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return done.stdout.strip() or "unknown"


class Neighbours:
    """How much processor time others took since this was made: processes that are not ours."""

    def __init__(self) -> None:
        self._start = self._foreign_seconds()

    def seconds(self) -> float:
        return self._foreign_seconds() - self._start

    def _foreign_seconds(self) -> float:
        everyone = psutil.cpu_times()
        ours = resource.getrusage(resource.RUSAGE_CHILDREN)
        busy = everyone.user + everyone.nice + everyone.system
        return busy - ours.ru_utime - ours.ru_stime


def wait_until_quiet(limit: float, patience: float) -> float:
    """Waits until others use less than `limit` of the processors; -> the share they use.

    Gives up with a message after `patience` seconds: a neighbour can make a step three times
    slower, because the fast threads wait for the slow one.
    """
    deadline = time.monotonic() + patience
    while (busy := psutil.cpu_percent(interval=2) / 100) >= limit:
        if time.monotonic() > deadline:
            sys.exit(f"Other processes use {busy:.0%} of the processors: nothing measured.")
    return busy
