"""Fork server: a process that has imported the libraries and forks each engine. Torch-free.

Imports are most of an engine's start. A fork shares what they made, in memory too, so that an
engine that ends is replaced in the time that its model takes to load.
"""

import os
import signal
import sys

from loraplex.engine.process.heartbeat import Ended, Started, write_report

START = b"start\n"  # what the supervisor writes whenever it wants an engine
CAN_FORK = sys.platform == "linux"  # macOS breaks frameworks that are used after a fork


def fork_engines(commands: int, reports: int, supervisor: int) -> int | None:
    """Forks one engine at each `START`, one after another, and reports how each began and ended.

    Where processes cannot fork safely, this process itself becomes the first engine.

    Args:
        commands: the descriptor that `START` is read from.
        reports: the descriptor that reports are written to.
        supervisor: the id of the process at the other end of both.

    Returns:
        In an engine: the id of the process that it must not outlive. In the fork server: None, once
        the supervisor wants no more engines.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when engines end, also
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # where a signal reaches the whole process group
    while os.read(commands, len(START)) == START:
        if not CAN_FORK:
            _become_engine(commands)
            write_report(reports, Started(os.getpid()))
            return supervisor
        fork_server = os.getpid()
        engine = os.fork()
        if engine == 0:
            _become_engine(commands)
            return fork_server
        write_report(reports, Started(engine))
        _, status = os.waitpid(engine, 0)
        write_report(reports, Ended(os.waitstatus_to_exitcode(status)))
    return None


def _become_engine(commands: int) -> None:
    """Leaves the commands to the fork server, and ends at SIGTERM until the engine handles it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, commands)
    os.close(nothing)
