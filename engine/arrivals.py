"""Arrivals: a ZeroMQ socket's messages as a running asyncio loop sees them. Torch-free."""

import asyncio
from collections.abc import Callable

import zmq


class Arrivals:
    """Calls `take` with the frames of each message, at once and on the loop.

    ZeroMQ's own asyncio sockets make two futures per message; a token has no time for them.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", take: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._drain)
        self.look()

    def look(self) -> None:
        """To be called after each send: sending can use up the news of an arrival."""
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Before the socket is closed."""
        self._loop.remove_reader(self._descriptor)

    def _drain(self) -> None:
        """The descriptor tells once that there is something, not for as long as there is."""
        while not self._socket.closed:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)
