"""A real `loraplex serve` on a free port, and the clients to talk to it."""

import contextlib
import os
import re
import signal
import subprocess
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx
import psutil
from openai import AsyncOpenAI, OpenAI

from loraplex.engine.client import EngineClient

LORAPLEX = Path(sysconfig.get_path("scripts")) / "loraplex"
KEY = "a-key-for-tests"
FRESH_METRICS = ("--metrics-max-age", "0")  # a test must not see those of the one before
METRICS_TOKEN = "a-token-for-tests"  # of servers that are given one
METRICS_HEADERS = {"authorization": f"Bearer {METRICS_TOKEN}"}
READY = re.compile(r"export OPENAI_BASE_URL=(\S+)/v1")


class Server:
    """A started server. `wait_ready` before use."""

    def __init__(self, home: Path, *options: str) -> None:
        self._home = home
        environment = {**os.environ, "LORAPLEX_HOME": str(home), "OMP_NUM_THREADS": "1"}
        command = [
            str(LORAPLEX),
            "serve",
            "--port",
            "0",
            "--api-key",
            KEY,
            *FRESH_METRICS,
            *options,
        ]
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.output: list[str] = []
        self.log: list[str] = []
        self._readers = [
            threading.Thread(target=_read, args=(self._process.stdout, self.output)),
            threading.Thread(target=_read, args=(self._process.stderr, self.log)),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def url(self) -> str:
        found = READY.search("".join(self.output))
        assert found is not None, "".join(self.log)
        return found[1]

    def wait_ready(self, timeout: float = 120) -> None:
        deadline = time.monotonic() + timeout
        while not READY.search("".join(self.output)):
            assert self._process.poll() is None, "".join(self.log)
            assert time.monotonic() < deadline, "".join(self.log)
            time.sleep(0.05)

    def wait_healthy(self, timeout: float = 60) -> None:
        deadline = time.monotonic() + timeout
        while httpx.get(f"{self.url}/health").status_code != 200:
            assert time.monotonic() < deadline, "".join(self.log)
            time.sleep(0.05)

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60)

    def async_client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60)

    def http(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60
        )

    def engine_client(self) -> EngineClient:
        """One more client of the same engine."""
        (socket,) = (self._home / "run").iterdir()
        return EngineClient(f"ipc://{socket}")

    def metric(self, name: str) -> float:
        """The sum over all label values."""
        text = httpx.get(f"{self.url}/metrics", headers=METRICS_HEADERS).text
        rows = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, rows))

    def wait_idle(self, timeout: float = 20) -> None:
        """Until nothing runs or waits; then no block and no adapter slot may be held."""
        deadline = time.monotonic() + timeout
        while self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert self.metric("loraplex:kv_blocks") == self.metric("loraplex:kv_blocks_free") > 0
        assert self.metric("loraplex:adapter_references") == 0

    def memory(self) -> int:
        """Bytes that the API's process has in memory."""
        return int(psutil.Process(self._process.pid).memory_info().rss)

    def engine(self) -> psutil.Process:
        """The engine's process, as soon as there is one."""
        deadline = time.monotonic() + 60
        while not (engines := self._engines()):
            assert time.monotonic() < deadline, "".join(self.log)
            time.sleep(0.01)
        return engines[0]

    def _engines(self) -> list[psutil.Process]:
        """The forks of the fork server; chat templates run in children of the server too."""
        children = psutil.Process(self._process.pid).children()
        with contextlib.suppress(psutil.NoSuchProcess):
            servers = [child for child in children if "loraplex.engine.server" in child.cmdline()]
            return [engine for server in servers for engine in server.children()]
        return []

    def stop(self) -> int:
        """Asks it to end, and returns its exit status."""
        self._process.terminate()
        return self.wait_exit()

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Ends it without a word."""
        self._process.kill()
        self.wait_exit()

    def wait_exit(self, timeout: float = 60) -> int:
        try:
            status = self._process.wait(timeout)
        finally:
            self._process.kill()
            for reader in self._readers:
                reader.join()
            for pipe in (self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()
        return status


@contextmanager
def running_server(home: Path, *options: str) -> Iterator[Server]:
    server = Server(home, *options)
    try:
        server.wait_ready()
        yield server
    except BaseException:
        server.kill()
        raise
    assert server.stop() == 0, "".join(server.log)


def _read(pipe: IO[str], lines: list[str]) -> None:
    for line in pipe:
        lines.append(line)
