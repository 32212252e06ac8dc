"""What a number was measured on, and how quiet it was there."""

import ctypes
import os
import platform
import re
import resource
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

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


def versions() -> dict[str, str]:
    """Of this interpreter, and of what is installed in it."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def version_in(python: Path, *names: str) -> str:
    """Of packages in another interpreter's environment."""
    script = f"from importlib.metadata import version; print(*map(version, {names}))"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "not installed"


def commit() -> str:
    """The short commit, with a mark when the tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return done.stdout.strip() or "unknown"


def read_rate() -> float:
    """GB/s at which all threads together read an array beyond any cache: the best of ten."""
    array = torch.ones(2**26)  # 256 MiB
    times = []
    for _ in range(10):
        start = time.perf_counter()
        array.sum()
        times.append(time.perf_counter() - start)
    return array.nbytes / min(times) / 1e9


def weight_bytes(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


class Neighbours:
    """How much processor time others took since this was made: processes that are not ours.

    Linux hands processes whose parent has ended to us, so that a server's workers are ours too.
    """

    def __init__(self) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(36, 1)  # 36: PR_SET_CHILD_SUBREAPER
        self._start = self._foreign_seconds()

    def seconds(self) -> float:
        return self._foreign_seconds() - self._start

    def _foreign_seconds(self) -> float:
        self._take_orphans()
        everyone = psutil.cpu_times()
        ours = resource.getrusage(resource.RUSAGE_CHILDREN)
        busy = everyone.user + everyone.nice + everyone.system
        return busy - ours.ru_utime - ours.ru_stime

    def _take_orphans(self) -> None:
        """Their times count once they have been waited for."""
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def wait_until_quiet(limit: float, max_wait_s: float) -> float:
    """Waits until others use less than `limit` of the processors; -> the share they use.

    Gives up with a message after `max_wait_s` seconds: a neighbour can make a step three times
    slower, because the fast threads wait for the slow one.
    """
    deadline = time.monotonic() + max_wait_s
    while (busy := psutil.cpu_percent(interval=2) / 100) >= limit:
        if time.monotonic() > deadline:
            sys.exit(f"Other processes use {busy:.0%} of the processors: nothing measured.")
    return busy
