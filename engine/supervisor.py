"""EngineSupervisor: keeps one engine process running. Torch-free."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence

import msgspec

from loraplex.engine.client import EngineClient
from loraplex.engine.config import EngineConfig, HangLimits
from loraplex.engine.errors import StartRefused
from loraplex.engine.process.fork_server import START
from loraplex.engine.process.hang_detector import HangDetector
from loraplex.engine.process.heartbeat import Beat, Ended, Refusal, Report, Started

ENGINE_COMMAND = (
    "env",
    # Else torch's threads spin for milliseconds after each of its operations, and those of the
    # native kernels wait for the cores.
    "OMP_WAIT_POLICY=PASSIVE",
    # A process is safe to fork while it has one thread and has not touched a GPU.
    "OPENBLAS_NUM_THREADS=1",
    "PYTORCH_NVML_BASED_CUDA_CHECK=1",
    sys.executable,
    "-P",  # the folder it is started in is none of its import paths
    "-m",
    "loraplex.engine.server",
)
EXIT_REFUSED = 3  # as in engine/server.py
TICK_SECONDS = 0.5
NOTICE_SECONDS = 10.0  # in which an engine that is to end saves its cache

logger = logging.getLogger(__name__)


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """When an engine that ended is started again. Times in seconds.

    The pause does not grow: an engine that served takes seconds to start, which is pause enough,
    and one that does not start is given up.
    """

    max_failed_starts: int = 3  # in a row, before it gives up
    delay: float = 0.2
    delay_after_error: float = 1.0  # where the supervisor itself failed


class EngineSupervisor:
    """Starts the engine that `client` talks to, and starts it again whenever it ends or hangs.

    Engines are forks of one process that has imported the libraries (`fork_server`), so that a
    restart takes as long as loading the model.

    Args:
        limits: when an engine is taken for hung.
        command: what forks the engines, run with the address, the config as JSON and this process's
            id added.
    """

    def __init__(
        self,
        config: EngineConfig,
        client: EngineClient,
        policy: RestartPolicy | None = None,
        limits: HangLimits | None = None,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        self.pid: int | None = None  # the engine's
        self._config = config
        self._client = client
        self._policy = policy or RestartPolicy()
        self._limits = limits or HangLimits()
        self._command = command
        self._detector = HangDetector(self._limits, TICK_SECONDS)
        self._fork_server: asyncio.subprocess.Process | None = None

    @property
    def is_responsive(self) -> bool:
        """Returns whether there is an engine process that has shown signs of life lately."""
        return self.pid is not None and self._detector.is_responsive

    async def run(self) -> None:
        """Keeps an engine running until it is cancelled; then it ends the engine, with notice.

        An error of its own, such as a lack of descriptors or of memory, is logged, and it tries
        again.

        Raises:
            StartRefused: with the reason, if the engine refuses its settings, or if it ended
                several times in a row before it was ready.
        """
        try:
            await self._run()
        finally:
            await self._drop_fork_server()

    async def _run(self) -> None:
        failed_starts = 0
        while True:
            served = self._client.times_ready
            try:
                status, refusal = await self._live()
            except Exception:
                logger.exception("The engine could not be supervised; it is started again")
                await self._drop_fork_server()
                await asyncio.sleep(self._policy.delay_after_error)
                continue
            if status == EXIT_REFUSED:
                raise StartRefused(refusal or "The engine refused to start.")
            was_ready = self._client.times_ready > served
            failed_starts = 0 if was_ready else failed_starts + 1
            if failed_starts == self._policy.max_failed_starts:
                raise StartRefused(
                    f"The engine ended {failed_starts} times in a row while it started, "
                    f"the last time with {_describe(status)}. Its log shows why."
                )
            logger.error("The engine ended with %s; it is restarted", _describe(status))
            await asyncio.sleep(self._policy.delay)

    async def _live(self) -> tuple[int, str]:
        """Runs one engine to its end; returns its exit status, and why it refused to start if it
        did."""
        fork_server = await self._living_fork_server()
        assert fork_server.stdin is not None
        if not fork_server.stdin.is_closing():  # if it has ended, that is noticed below
            with contextlib.suppress(ConnectionError):
                fork_server.stdin.write(START)
                await fork_server.stdin.drain()
        self._detector = HangDetector(self._limits, TICK_SECONDS)
        watching = asyncio.create_task(self._watch(fork_server))
        life = asyncio.create_task(self._read_reports(fork_server))
        try:
            return await asyncio.shield(life)
        finally:
            watching.cancel()
            await self._end(fork_server, life)
            self.pid = None

    async def _living_fork_server(self) -> asyncio.subprocess.Process:
        if self._fork_server is None or self._fork_server.returncode is not None:
            self._fork_server = await asyncio.create_subprocess_exec(
                *self._command,
                self._client.address,
                msgspec.json.encode(self._config).decode(),
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        return self._fork_server

    async def _drop_fork_server(self) -> None:
        """Kills the fork server, and with it the engine that it may have."""
        fork_server, self._fork_server = self._fork_server, None
        if fork_server is not None:
            _kill(fork_server)
            await fork_server.wait()

    async def _read_reports(self, fork_server: asyncio.subprocess.Process) -> tuple[int, str]:
        """Notes heartbeats until the engine ends; how it ended, and what it refused to start with.

        Where the engine is the process itself, or that process ends first, its status is taken.
        """
        assert fork_server.stdout is not None
        decoder, refusal = msgspec.json.Decoder(Report), ""
        async for line in fork_server.stdout:
            with contextlib.suppress(msgspec.MsgspecError):  # the last one may have been cut
                match decoder.decode(line):
                    case Started(pid):
                        self.pid = pid
                    case Beat() as beat:
                        self._detector.note(beat)
                    case Refusal(message):
                        refusal = message
                    case Ended(status):
                        return status, refusal
        return await fork_server.wait(), refusal

    async def _watch(self, fork_server: asyncio.subprocess.Process) -> None:
        """Kills the engine once it is hung; nothing less ends a process that is stopped."""
        reason = None
        while reason is None:
            await asyncio.sleep(TICK_SECONDS)
            reason = self._detector.tick()
        logger.error("The engine hangs: %s; it is killed", reason)
        self._signal(fork_server, signal.SIGKILL)
        await asyncio.sleep(NOTICE_SECONDS)
        _kill(fork_server)  # it hangs, too: it would have reported the engine's end

    async def _end(
        self, fork_server: asyncio.subprocess.Process, life: asyncio.Task[tuple[int, str]]
    ) -> None:
        """Ends the engine with notice, unless it has ended already."""
        if life.done():
            return
        self._signal(fork_server, signal.SIGTERM)
        await asyncio.wait([life], timeout=NOTICE_SECONDS)
        if not life.done():
            _kill(fork_server)  # and with it the engine
            await life

    def _signal(self, fork_server: asyncio.subprocess.Process, number: signal.Signals) -> None:
        """Sends a signal to the engine, or ends the process that was about to fork it."""
        if self.pid is None:
            _kill(fork_server)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _describe(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"
