"""Connections: counts the open connections, limits them, and ends those that are overdue."""

import asyncio
import resource
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from loraplex.platform.errors import ApiError, TooManyConnections

OWN_FILES = 96  # open files that the process itself needs: engine, sockets, modules, log
FEWEST_CONNECTIONS = 8
SWEEP_SECONDS = 0.25
YOUNGEST_EVICTED = 1.0  # seconds for which a connection may wait before it can be evicted


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of connections; times in seconds."""

    max_connections: int = 4096
    max_per_address: int = 512
    request_timeout: float = 10.0  # for a request's head, and for each further part of its body
    send_timeout: float = 60.0  # for a client to read any part of its answer
    keep_alive_timeout: float = 60.0  # for the next request on a connection


class Connection(Protocol):
    """A connection as `Connections` sees it."""

    address: str

    @property
    def waiting_since(self) -> float | None:
        """When the wait for a request's head began; None while a request is running."""

    def check(self, now: float) -> None:
        """Ends the connection if its client is too slow."""

    def end(self) -> None:
        """Ends the connection at once, whatever its state."""


class Connections:
    """Counts connections in total and by address, and checks for slow clients at intervals."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._capacity = min(limits.max_connections, _files_for_connections())
        self._open: dict[Connection, None] = {}  # in the order of their coming
        self._by_address: Counter[str] = Counter()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: Connection) -> ApiError | None:
        """Counts a connection, or returns why it cannot be served.

        A full server makes room by ending the connection that has waited longest for a request.
        """
        if self._by_address[connection.address] >= self.limits.max_per_address:
            return TooManyConnections("There are too many connections from this address.")
        if len(self._open) >= self._capacity and not self._evict():
            return TooManyConnections("There are too many connections to this server.")
        self._open[connection] = None
        self._by_address[connection.address] += 1
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.call_later(SWEEP_SECONDS, self._sweep)
        return None

    def forget(self, connection: Connection) -> None:
        """Stops counting a connection, if it was admitted."""
        if connection in self._open:
            del self._open[connection]
            self._by_address[connection.address] -= 1
            if not self._by_address[connection.address]:
                del self._by_address[connection.address]

    def end_all(self) -> None:
        for connection in list(self._open):
            connection.end()

    def _evict(self) -> bool:
        now = asyncio.get_running_loop().time()
        waits = {c: since for c in self._open if (since := c.waiting_since) is not None}
        oldest = min(waits, key=waits.__getitem__, default=None)
        if oldest is None or now - waits[oldest] < YOUNGEST_EVICTED:
            return False
        oldest.end()
        self.forget(oldest)
        return True

    def _sweep(self) -> None:
        """Checks every connection, and schedules the next sweep while any is open."""
        if self._loop is None or not self._open:
            self._loop = None
            return
        now = self._loop.time()
        for connection in list(self._open):
            connection.check(now)
        self._loop.call_later(SWEEP_SECONDS, self._sweep)


def _files_for_connections() -> int:
    """Raises the limit on open files, and returns how many connections it leaves room for."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = 2**16
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft != resource.RLIM_INFINITY and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(FEWEST_CONNECTIONS, hard - OWN_FILES)
