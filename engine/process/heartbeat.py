"""Heartbeat: an engine process's reports to its supervisor, sent whatever its loop does.
Torch-free."""

import os
import sys
import threading
import time
from enum import StrEnum
from pathlib import Path

import msgspec

BEAT_SECONDS = 0.5
BUSY_SHARE = 0.1  # of one core, from which on a process counts as computing


class Phase(StrEnum):
    """What the engine's loop is doing."""

    START = "start"  # it loads the model
    WAIT = "wait"  # it waits for commands, for a quarter of a second at most
    WORK = "work"  # it obeys commands, or computes a step
    END = "end"  # it saves its cache


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """One sign of life."""

    phase: Phase
    spell: int  # which one of all phases since the start; another one is progress
    seconds: float  # since it began
    is_busy: bool  # it works, and the process, or one that it started, computed since the last beat


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Why the engine refuses to start."""

    message: str


class Started(msgspec.Struct, frozen=True, tag="started"):
    """Which process became the engine."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """How the engine's process ended."""

    status: int  # its exit status; below 0, the signal that ended it


Report = Beat | Refusal | Started | Ended
_encoder = msgspec.json.Encoder()


def write_report(descriptor: int, report: Report) -> None:
    """Writes one line of JSON, whole. Raises OSError where nobody reads."""
    os.write(descriptor, _encoder.encode(report) + b"\n")


class Heartbeat:
    """Writes a `Beat` to a descriptor twice a second, from a thread of its own.

    The supervisor can thus tell a stopped process (no beats) from a loop that does not move (beats,
    and a phase that does not end).

    Args:
        descriptor: written to as lines of JSON, a `Report` each.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._state = (Phase.START, 0, time.monotonic())
        self._cpu_seconds = time.process_time()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def enter(self, phase: Phase) -> None:
        """Records that the loop begins something else."""
        self._state = (phase, self._state[1] + 1, time.monotonic())

    def refuse(self, message: str) -> None:
        """Reports why the engine does not start."""
        write_report(self._descriptor, Refusal(message))

    def close(self) -> None:
        self._ended.set()
        self._thread.join(timeout=1)  # it may be writing to somebody who does not read

    def _run(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            phase, spell, since = self._state
            try:
                seconds = time.monotonic() - since
                beat = Beat(phase, spell, seconds, self._is_busy(phase))
                write_report(self._descriptor, beat)
            except OSError:  # nobody reads any more
                return

    def _is_busy(self, phase: Phase) -> bool:
        before, self._cpu_seconds = self._cpu_seconds, time.process_time()
        if phase is Phase.WAIT:
            return False
        return self._cpu_seconds - before > BUSY_SHARE * BEAT_SECONDS or _has_children()


def _has_children() -> bool:
    """Returns whether this process waits for another, such as a compiler; True where that is
    unknown."""
    if sys.platform != "linux":
        return True
    try:
        return any(path.read_bytes() for path in Path("/proc/self/task").glob("*/children"))
    except OSError:  # a thread that ended meanwhile
        return True
