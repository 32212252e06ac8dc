"""How each server under test is started: a class per server, a context for all."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

KEY = "benchmark-key"
DEADLINE = 600.0  # seconds that a server may take to be ready


@dataclass(frozen=True)
class Setup:
    """What every server is asked to serve."""

    model: Path
    adapters: dict[str, Path]
    port: int
    max_model_len: int
    adapter_slots: int = 16
    kv_gib: int = 4  # KV memory

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class Loraplex:
    def command(self, setup: Setup) -> list[str]:
        command = [str(Path(sys.executable).with_name("loraplex")), "serve"]
        command += ["--model", str(setup.model), "--served-model-name", "base"]
        command += ["--host", "127.0.0.1", "--port", str(setup.port), "--api-key", KEY]
        command += ["--max-model-len", str(setup.max_model_len)]
        command += ["--max-adapter-slots", str(setup.adapter_slots), "--dtype", "bfloat16"]
        command += ["--kv-cache-memory", str(setup.kv_gib * 2**30)]
        for name, folder in setup.adapters.items():
            command += ["--adapter", f"{name}={folder}"]
        return command

    def environment(self, setup: Setup) -> dict[str, str]:
        return {}

    def own_numbers(self, url: str) -> dict[str, float]:
        """KV slots allocated but not used, over allocated ones: from the server's own metrics."""
        text = httpx.get(f"{url}/metrics").text
        found = re.findall(r"^loraplex:kv_(waste_\w+)\S* (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}


@dataclass(frozen=True)
class VLLM:
    """vLLM from another virtual environment, for CPU: its own torch would not fit into ours."""

    python: Path

    def command(self, setup: Setup) -> list[str]:
        command = [str(self.python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(setup.model), "--served-model-name", "base"]
        command += ["--host", "127.0.0.1", "--port", str(setup.port), "--api-key", KEY]
        command += ["--max-model-len", str(setup.max_model_len), "--dtype", "bfloat16"]
        command += ["--enable-prompt-tokens-details"]
        if setup.adapters:
            command += ["--enable-lora", "--max-loras", str(setup.adapter_slots)]
            command += ["--max-lora-rank", "16", "--max-cpu-loras", "64", "--lora-modules"]
            command += [f"{name}={folder}" for name, folder in setup.adapters.items()]
        return command

    def environment(self, setup: Setup) -> dict[str, str]:
        return {
            "VLLM_CPU_KVCACHE_SPACE": str(setup.kv_gib),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
            "HF_HUB_OFFLINE": "1",
        }

    def own_numbers(self, url: str) -> dict[str, float]:
        return {}


@contextmanager
def running(
    server: Loraplex | VLLM, setup: Setup, log: Path
) -> Iterator[tuple[psutil.Process, float]]:
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


def memory(process: psutil.Process) -> dict[str, int]:
    """Resident and proportional memory of the server and all its children, in MiB."""
    family = [process, *process.children(recursive=True)]
    infos = [member.memory_full_info() for member in family]
    return {
        "processes": len(infos),
        "rss_mb": sum(info.rss for info in infos) // 2**20,
        "pss_mb": sum(info.pss for info in infos) // 2**20,
    }
