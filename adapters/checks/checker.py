"""AdapterChecker: has adapters checked in a process beside the engine's. Torch-free."""

import logging
import socket
import subprocess
import sys
import threading
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import msgspec

from loraplex.adapters.checks import judge
from loraplex.adapters.checks.catalogue import TargetCatalogue
from loraplex.adapters.checks.judge import (
    TOO_COSTLY,
    Answer,
    Base,
    Identify,
    Identity,
    Plan,
    Planned,
    Question,
    Refusal,
)
from loraplex.adapters.checks.plan import AdapterPlan
from loraplex.adapters.errors import AdapterRejected, AdapterUnavailable

_SECONDS = 60  # beside the judge's own limit, for a machine that is busy

T = TypeVar("T", Identity, Planned)

logger = logging.getLogger(__name__)


class AdapterChecker:
    """Starts the checking process when it is first needed, and again after one that had to be
    ended.

    Safe for several threads; one question is asked at a time.

    Args:
        base: the base model's modules.
        added_tokens: what the base model's own tokenizer adds to its vocabulary, with the ids.
    """

    def __init__(self, base: TargetCatalogue, added_tokens: dict[str, int]) -> None:
        self._base = Base(list(base.modules.values()), dict(base.others), added_tokens)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._end: weakref.finalize[..., AdapterChecker] | None = None

    def identify(self, folder: Path, source: Path | None) -> Identity:
        """Returns what a config describes. Also checks the tokenizer files of `source`.

        Raises:
            AdapterRejected: with every fault.
            AdapterUnavailable: nothing can be judged now.
        """
        where = None if source is None else str(source)
        return self._ask(Identify(str(folder), where), Identity)

    def plan(self, folder: Path) -> AdapterPlan:
        """Returns how the adapter in a folder is loaded.

        Raises:
            AdapterRejected: with every fault.
            AdapterUnavailable: nothing can be judged now.
        """
        return self._ask(Plan(str(folder)), Planned).plan

    @property
    def process_id(self) -> int | None:
        """Returns the id of the checking process; None where none runs."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """Ends the checking process."""
        with self._lock:
            self._stop()

    def _ask(self, question: Question, wanted: type[T]) -> T:
        with self._lock:
            answer = self._answer(question)
        if isinstance(answer, wanted):
            return answer
        if isinstance(answer, Refusal):
            raise AdapterRejected(answer.faults)
        logger.error("An adapter could not be judged: %s", answer)
        raise AdapterUnavailable("the adapter could not be judged")

    def _answer(self, question: Question) -> Answer:
        for _ in range(2):  # a judge may have been ended before it was asked
            try:
                connection = self._connection or self._start()
                connection.send_bytes(msgspec.msgpack.encode(question))
                if connection.poll(_SECONDS):
                    return msgspec.msgpack.decode(connection.recv_bytes(), type=Answer)
            except (EOFError, ConnectionError):
                self._stop()
                continue
            except OSError as error:
                self._stop()
                raise AdapterUnavailable("the adapter could not be judged") from error
            self._stop()
            break
        return Refusal([TOO_COSTLY])

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", "-m", judge.__name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is not for it
            )
        connection = Connection(ours.detach())
        self._connection = connection
        self._end = weakref.finalize(self, _end, process, connection)
        connection.send_bytes(msgspec.msgpack.encode(self._base))
        return connection

    def _stop(self) -> None:
        self._process = self._connection = None
        if self._end is not None:
            self._end()


def _end(process: "subprocess.Popen[bytes]", connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()
