"""EngineServer: the process around one LLMEngine. Run as `python -m loraplex.engine.server`.

Its arguments are the address to bind, an EngineConfig as JSON, and the id of the supervisor's
process, which it must not outlive. It forks an engine whenever its standard input says so. On
standard output go reports: how an engine began and ended, its heartbeats, and the reason why it
refuses to start; all else goes to standard error.
"""

import ctypes
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import INTERNAL_ERROR, RequestRejected, StartRefused
from loraplex.engine.process.fork_server import fork_engines
from loraplex.engine.process.heartbeat import Heartbeat, Phase
from loraplex.engine.process.libraries import import_engine
from loraplex.engine.protocol import (
    Command,
    EngineCommand,
    EngineInfo,
    Event,
    FailureCode,
    Hello,
    RequestFailed,
    StartProgress,
)
from loraplex.engine.server_socket import ServerSocket

EXIT_FAILED = 1  # a step failed; a fresh start may help
EXIT_REFUSED = 3  # a restart would not help
IDLE_MS = 250  # how often an idle engine looks whether its parent still lives
LOADING_MS = 5
COMMAND_SECONDS = 0.01  # between two steps, spent on commands

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """What the server needs of an LLMEngine."""

    info: EngineInfo

    @property
    def has_work(self) -> bool: ...
    @property
    def is_waiting(self) -> bool: ...
    def submit(self, command: EngineCommand) -> list[Event]: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[Event]: ...
    def prepare(self) -> bool: ...
    def save_cache(self) -> None: ...
    def close(self) -> None: ...


class EngineServer:
    """Receives commands, steps the engine and sends its events; blocks while there is no work."""

    def __init__(
        self, engine: Engine, socket: ServerSocket, parent: int, heartbeat: Heartbeat
    ) -> None:
        self._engine = engine
        self._socket = socket
        self._parent = parent
        self._heartbeat = heartbeat
        self._stopping = False
        self._is_prepared = False

    def run(self) -> None:
        """Serves until told to stop, or until the parent process ends.

        Raises:
            Exception: what a step raised, once every open request has been failed.
        """
        self._send([self._engine.info])
        try:
            while not self._stopping and os.getppid() == self._parent:
                self._loop_once()
            self._heartbeat.enter(Phase.END)
            self._fail_all()
            self._engine.save_cache()
        finally:
            self._fail_all()
            self._engine.close()

    def stop(self) -> None:
        """Ends `run` after the step under way."""
        self._stopping = True

    def _loop_once(self) -> None:
        self._heartbeat.enter(Phase.WAIT)
        self._socket.wait(self._poll_ms())
        self._heartbeat.enter(Phase.WORK)
        num_commands = self._execute_some()
        if self._engine.has_work or self._engine.is_waiting:
            self._send(self._engine.step())
            self._is_prepared = False
        elif not num_commands and not self._is_prepared:
            self._is_prepared = not self._engine.prepare()

    def _execute_some(self) -> int:
        """Executes waiting commands, but leaves some for later rather than delay a step for very
        many; returns how many it executed."""
        end, count = time.monotonic() + COMMAND_SECONDS, 0
        for command in self._socket.receive():
            self._execute(command)
            count += 1
            if time.monotonic() >= end:
                break
        return count

    def _poll_ms(self) -> int:
        if self._engine.has_work:
            return 0
        if self._engine.is_waiting:
            return LOADING_MS
        return IDLE_MS if self._is_prepared else 0

    def _execute(self, command: Command) -> None:
        match command:
            case Hello():
                pass  # answered by the socket
            case _:
                self._submit(command)

    def _submit(self, command: EngineCommand) -> None:
        try:
            self._send(self._engine.submit(command))
        except RequestRejected as rejection:
            self._send([rejection.to_event(command.request_id)])
        except Exception:
            logger.exception("Request %s failed", command.request_id)
            self._send([_internal_failure(command.request_id)])

    def _send(self, events: list[Event]) -> None:
        for request_id in self._socket.send(events):
            self._engine.abort(request_id)

    def _fail_all(self) -> None:
        self._socket.send(
            [
                RequestFailed(
                    request_id=request_id,
                    code=FailureCode.ENGINE_UNAVAILABLE,
                    message="The engine stopped before this request was complete; try again.",
                )
                for request_id in self._socket.open_requests
            ]
        )


def _internal_failure(request_id: str) -> RequestFailed:
    return RequestFailed(
        request_id=request_id,
        code=FailureCode.INTERNAL,
        message=INTERNAL_ERROR,
    )


def serve(
    address: str,
    make_engine: Callable[[Callable[[StartProgress], None]], Engine],
    reports: int,
    parent: int,
) -> int:
    """Runs one engine until it is stopped, and returns the process's exit status.

    Args:
        address: to bind.
        make_engine: given a function to report progress to. What it refuses with `StartRefused` is
            reported.
        reports: the descriptor that reports are written to.
        parent: the id of the process whose end ends this one, too.
    """
    die_with_parent()
    heartbeat = Heartbeat(reports)
    socket = ServerSocket(address)

    def progress(step: StartProgress) -> None:
        if os.getppid() != parent:
            raise StartRefused("The process that started this engine has ended.")
        for _ in socket.receive():  # greets clients
            pass
        socket.send([step])

    try:
        server = EngineServer(make_engine(progress), socket, parent, heartbeat)
        signal.signal(signal.SIGTERM, lambda *_: server.stop())
        server.run()
    except StartRefused as refusal:
        heartbeat.refuse(refusal.message)
        return EXIT_REFUSED
    except Exception:
        logger.exception("The engine failed")
        return EXIT_FAILED
    finally:
        socket.close()
        heartbeat.close()
    return 0


def die_with_parent() -> None:
    """Asks Linux to end this process when its parent ends; elsewhere `run` looks by itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


def run(
    import_libraries: Callable[[], None],
    make_engine: Callable[[EngineConfig, Callable[[StartProgress], None]], Engine],
) -> int:
    """Imports the libraries once, and serves one engine after another from forks of this process;
    returns the exit status of this process or of a fork."""
    address, config = sys.argv[1], msgspec.json.decode(sys.argv[2], type=EngineConfig)
    die_with_parent()
    reports = _take_standard_output()
    import_libraries()
    gc.collect()
    gc.freeze()  # a collection in an engine would write to, and so copy, the pages that it shares
    parent = fork_engines(sys.stdin.fileno(), reports, int(sys.argv[3]))
    if parent is None:
        return 0
    return serve(address, partial(make_engine, config), reports, parent)


def _load(config: EngineConfig, progress: Callable[[StartProgress], None]) -> Engine:
    from loraplex.engine.llm_engine import LLMEngine  # noqa: PLC0415 - seconds of torch

    return LLMEngine.load(config, progress)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s engine: %(message)s")
    return run(import_engine, _load)


def _take_standard_output() -> int:
    """Reserves the real standard output for reports and sends all other writes to stderr."""
    reports = os.dup(1)
    os.dup2(2, 1)
    return reports


if __name__ == "__main__":
    sys.exit(main())
