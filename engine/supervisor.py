"""EngineSupervisor: keeps one engine process running. Torch-free."""

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Sequence

import msgspec

from loraplex.engine.client import EngineClient
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import StartRefused

ENGINE_COMMAND = (
    "env",
    # Else torch's threads spin for milliseconds after each of its operations, and those of the
    # native kernels wait for the cores.
    "OMP_WAIT_POLICY=PASSIVE",
    sys.executable,
    "-P",  # the folder it is started in is none of its import paths
    "-m",
    "loraplex.engine.server",
)
EXIT_REFUSED = 3  # as in engine/server.py

logger = logging.getLogger(__name__)


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """When an engine that ended is started again. Times in seconds."""

    max_failed_starts: int = 3  # in a row, before it gives up
    first_delay: float = 0.2
    max_delay: float = 30.0
    settled_after: float = 60.0  # an engine that lived this long ended for a new reason

    def delay(self, short_lives: int) -> float:
        return min(self.max_delay, self.first_delay * 2.0 ** (short_lives - 1))


class EngineSupervisor:
    """Starts the engine that `client` talks to, and starts it again whenever it ends.

    Args:
        command: what is run, with the address, the config as JSON and this process's id added.
    """

    def __init__(
        self,
        config: EngineConfig,
        client: EngineClient,
        policy: RestartPolicy | None = None,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        self.pid: int | None = None
        self._config = config
        self._client = client
        self._policy = policy or RestartPolicy()
        self._command = command

    async def run(self) -> None:
        """Goes on until it is cancelled; then it ends the engine, with 10 seconds' notice.

        Raises:
            StartRefused: with the reason, if the engine refuses its settings, or if it ended
                several times in a row before it was ready.
        """
        failed_starts = short_lives = 0
        while True:
            served, started = self._client.times_ready, time.monotonic()
            status, report = await self._live()
            if status == EXIT_REFUSED:
                raise StartRefused(report or "The engine refused to start.")
            was_ready = self._client.times_ready > served
            failed_starts = 0 if was_ready else failed_starts + 1
            if failed_starts == self._policy.max_failed_starts:
                raise StartRefused(
                    f"The engine ended {failed_starts} times in a row while it started, "
                    f"the last time with {_describe(status)}. Its log shows why."
                )
            lived = time.monotonic() - started
            short_lives = 1 if lived > self._policy.settled_after else short_lives + 1
            logger.error("The engine ended with %s; it is restarted", _describe(status))
            await asyncio.sleep(self._policy.delay(short_lives))

    async def _live(self) -> tuple[int, str]:
        """One engine's life: its exit status, and what it reported."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            self._client.address,
            msgspec.json.encode(self._config).decode(),
            str(os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        self.pid = process.pid
        try:
            report, _ = await process.communicate()
        finally:
            self.pid = None
            await _end(process)
        return process.returncode or 0, report.decode(errors="replace").strip()


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), timeout=10)
    except TimeoutError:
        process.kill()
        await process.wait()


def _describe(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"
