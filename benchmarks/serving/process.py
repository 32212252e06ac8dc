"""A server's processes: started in a session of their own, waited for, weighed and stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
from servers import MIB, Server, Setup

DEADLINE = 600.0  # seconds that a server may take to be ready


@contextmanager
def running(server: Server, setup: Setup, log: Path) -> Iterator[tuple[psutil.Process, float]]:
    """Starts the server in its own session; yields it and the seconds until /health said 200."""
    start = time.perf_counter()
    with log.open("w") as out:
        process = subprocess.Popen(
            server.command(setup),
            env=os.environ | server.environment(setup),
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        wait_until_healthy(process, setup.url, log)
        yield psutil.Process(process.pid), time.perf_counter() - start
    finally:
        stop(process)


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.perf_counter() + DEADLINE
    while not is_healthy(url):
        if process.poll() is not None:
            sys.exit(f"The server ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        if time.perf_counter() > deadline:
            sys.exit(f"The server was not ready in {DEADLINE:.0f} s:\n{log.read_text()[-3000:]}")
        time.sleep(0.1)


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """As a person would, with an interrupt; and by force only if that does not help."""
    for sign in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, sign)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                continue


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def memory(process: psutil.Process) -> dict[str, int]:
    """Resident and proportional memory of the server and all its children, in MiB."""
    infos = [member.memory_full_info() for member in family(process)]
    return {
        "processes": len(infos),
        "rss_mb": sum(info.rss for info in infos) // MIB,
        "pss_mb": sum(info.pss for info in infos) // MIB,
    }


def processor_seconds(process: psutil.Process) -> list[float]:
    """What each process of the server has used so far, itself first."""
    times = [member.cpu_times() for member in family(process)]
    return [used.user + used.system for used in times]
