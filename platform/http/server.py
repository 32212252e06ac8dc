"""HttpServer: uvicorn with bounded connections and a stop that every caller is told of."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

from loraplex.platform.config import Settings
from loraplex.platform.http.connections import ConnectionLimits, Connections
from loraplex.platform.http.protocol import protocol_of

LAST_WORD_SECONDS = 1.0  # to send errors to the requests that did not finish in time


class HttpServer(uvicorn.Server):
    """A server whose `serve` returns after a signal, so that the process can clean up."""

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        self._stopping: asyncio.Event = app.state.stopping
        self._grace = settings.shutdown_timeout
        self._connections = Connections(
            ConnectionLimits(
                max_connections=settings.max_connections,
                max_per_address=settings.max_connections_per_address,
                request_timeout=settings.request_timeout,
                send_timeout=settings.send_timeout,
                keep_alive_timeout=settings.keep_alive_timeout,
            )
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol_of(self._connections),
                ws="none",
                log_level="warning",
                access_log=False,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to stop; a second signal ends running requests with an error."""
        if self.should_exit:
            self._stopping.set()
            asyncio.get_running_loop().call_later(LAST_WORD_SECONDS, self._connections.end_all)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits up to `shutdown_timeout` seconds for running requests; then ends the others with an
        error, and at last their connections."""
        loop = asyncio.get_running_loop()
        timers = [
            loop.call_later(self._grace, self._stopping.set),
            loop.call_later(self._grace + LAST_WORD_SECONDS, self._connections.end_all),
        ]
        try:
            await super().shutdown(sockets)
        finally:
            for timer in timers:
                timer.cancel()
