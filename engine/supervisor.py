"""EngineSupervisor: keeps one engine process running. Torch-free."""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Sequence

import msgspec

from loraplex.engine.client import EngineClient
from loraplex.engine.config import EngineConfig, HangLimits
from loraplex.engine.errors import EngineUnavailable, StartRefused
from loraplex.engine.hang_detector import HangDetector
from loraplex.engine.heartbeat import Beat, Refusal, Report
from loraplex.engine.spare import READY, SPARE, START

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
TICK_SECONDS = 0.5

logger = logging.getLogger(__name__)


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """When an engine that ended is started again. Times in seconds.

    The pause does not grow: an engine that served takes seconds to start, which is pause enough,
    and one that does not start is given up.
    """

    max_failed_starts: int = 3  # in a row, before it gives up
    delay: float = 0.2
    delay_after_error: float = 1.0  # where the supervisor itself failed
    spare_after: float | None = 10.0  # a served engine gets a spare process; None: it gets none


class EngineSupervisor:
    """Starts the engine that `client` talks to, and starts it again whenever it ends or hangs.

    Args:
        limits: when an engine is taken for hung.
        command: what is run, with the address, the config as JSON and this process's id added.
    """

    def __init__(
        self,
        config: EngineConfig,
        client: EngineClient,
        policy: RestartPolicy | None = None,
        limits: HangLimits | None = None,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        self.pid: int | None = None
        self._config = config
        self._client = client
        self._policy = policy or RestartPolicy()
        self._limits = limits or HangLimits()
        self._command = command
        self._detector = HangDetector(self._limits, TICK_SECONDS)
        self._spare: asyncio.subprocess.Process | None = None

    @property
    def spare_pid(self) -> int | None:
        """The process that takes the engine's place at its end, where there is one."""
        return None if self._spare is None else self._spare.pid

    @property
    def is_responsive(self) -> bool:
        """Whether there is an engine process and it has shown signs of life lately."""
        return self.pid is not None and self._detector.is_responsive

    async def run(self) -> None:
        """Goes on until it is cancelled; then it ends the engine, with 10 seconds' notice.

        While an engine serves, a spare process imports the libraries, which is most of a start.
        An error of its own, such as a lack of descriptors or of memory, is logged, and it tries
        again.

        Raises:
            StartRefused: with the reason, if the engine refuses its settings, or if it ended
                several times in a row before it was ready.
        """
        try:
            await self._run()
        finally:
            self._drop_spare()

    async def _run(self) -> None:
        failed_starts = 0
        while True:
            served = self._client.times_ready
            try:
                status, refusal = await self._live()
            except Exception:
                logger.exception("The engine could not be supervised; it is started again")
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
        """One engine's life: its exit status, and why it refused to start if it did."""
        process = self._start_spare() or await self._spawn()
        self.pid = process.pid
        self._detector = HangDetector(self._limits, TICK_SECONDS)
        watching = asyncio.create_task(self._watch(process))
        sparing = asyncio.create_task(self._keep_spare())
        try:
            refusal = await self._read_reports(process)
            await process.wait()
        finally:
            watching.cancel()
            sparing.cancel()
            self.pid = None
            await _end(process)
        return process.returncode or 0, refusal

    async def _spawn(self, *more: str) -> asyncio.subprocess.Process:
        """A process that starts an engine; a spare one reads when to from its standard input."""
        return await asyncio.create_subprocess_exec(
            *self._command,
            self._client.address,
            msgspec.json.encode(self._config).decode(),
            str(os.getpid()),
            *more,
            stdin=asyncio.subprocess.PIPE if more else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )

    async def _keep_spare(self) -> None:
        """Has a spare process made once the engine has served for a while."""
        if self._policy.spare_after is None:
            return
        try:
            await self._client.wait_ready()
            await asyncio.sleep(self._policy.spare_after)
            self._spare = await self._make_spare()
        except EngineUnavailable:
            return  # none will be needed
        except OSError:
            logger.exception("There is no spare engine process")

    async def _make_spare(self) -> asyncio.subprocess.Process | None:
        """Returns once it has imported all; None where it ended instead."""
        spare = await self._spawn(SPARE)
        assert spare.stdout is not None
        try:
            line = await spare.stdout.readline()
        except asyncio.CancelledError:  # the engine ended first: now a whole start is faster
            _kill(spare)
            raise
        if line == READY:
            return spare
        logger.error("The spare engine process ended before it was needed")
        return None

    def _start_spare(self) -> asyncio.subprocess.Process | None:
        """The spare process, which starts an engine now; None where there is none that lives."""
        spare, self._spare = self._spare, None
        if spare is None or spare.returncode is not None or spare.stdin is None:
            return None
        spare.stdin.write(START)
        spare.stdin.close()
        return spare

    def _drop_spare(self) -> None:
        """It has nothing to lose."""
        if self._spare is not None:
            _kill(self._spare)
        self._spare = None

    async def _read_reports(self, process: asyncio.subprocess.Process) -> str:
        """Notes heartbeats until the engine closes its end; what it refused to start with."""
        assert process.stdout is not None
        decoder, refusal = msgspec.json.Decoder(Report), ""
        async for line in process.stdout:
            with contextlib.suppress(msgspec.MsgspecError):  # the last one may have been cut
                report = decoder.decode(line)
                match report:
                    case Beat():
                        self._detector.note(report)
                    case Refusal():
                        refusal = report.message
        return refusal

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kills the engine once it is hung; nothing less ends a process that is stopped."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            reason = self._detector.tick()
            if reason is not None:
                logger.error("The engine hangs: %s; it is killed", reason)
                _kill(process)
                return


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), timeout=10)
    except TimeoutError:
        process.kill()
        await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _describe(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"
