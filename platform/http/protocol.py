"""ClientConnection: HTTP/1.1 on one connection, with bounds on the memory its client can take."""

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NoReturn, cast

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from loraplex.platform.errors import ApiError, HeadTooLarge, InvalidRequest, RequestTimeout
from loraplex.platform.http.connections import Connections

MAX_HEAD_BYTES = 2**16  # of a request line and its headers, and of pipelined requests
MAX_PIPELINED = 64  # requests that may wait for the one before
SMALL_PIECE, MAX_SMALL_PIECES = 16, 2**14  # bytes; of one body
MAX_IGNORED_BYTES = 2**20  # after a refused request
MAX_UNREAD_BODY = 2**26  # bytes of a body that arrive after its request has been answered
LINGER_SECONDS = 1.0
FEWEST_BODY_BYTES = 2**14  # of a body that must arrive within each request timeout


def protocol_of(connections: Connections) -> type[asyncio.Protocol]:
    """Returns the protocol that uvicorn makes for each accepted connection."""

    def make(
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> ClientConnection:
        return ClientConnection(connections, config, server_state, app_state)

    return cast(type[asyncio.Protocol], make)


class ClientConnection(HttpToolsProtocol):
    """uvicorn's protocol, but it reads one request at a time, so that it always sees a hang-up, and
    it cuts off clients that are too slow or send too much.

    A request finds its connection as `request.state.connection`.
    """

    def __init__(
        self,
        connections: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.address = ""
        self._connections = connections
        self._limits = connections.limits
        self.timeout_keep_alive = cast(int, self._limits.keep_alive_timeout)
        self._running: RequestResponseCycle | None = None
        self._early = bytearray()  # what came behind the request that is being answered
        self._is_refused = False
        self._ignored_bytes = 0
        self._refusal: ApiError | None = None
        self._is_in_body = False
        self._head_bytes = 0
        self._num_small_pieces = 0
        self._unread_body = 0
        self._unreported_bytes = 0  # since the parser last found a head's end or a piece of body
        self._waiting_since: float | None = None
        self._head_since: float | None = None
        self._part_since, self._part_bytes = 0.0, 0
        self._stalled_since, self._unsent_bytes = 0.0, 0

    @property
    def waiting_since(self) -> float | None:
        return self._waiting_since

    @property
    def is_stalled(self) -> bool:
        """Whether the client reads more slowly than the server sends."""
        return self.flow.write_paused

    def end(self) -> None:
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._waiting_since = self._head_since = self.loop.time()
        if (refusal := self._connections.admit(self)) is not None:
            self._is_refused = True
            transport.write(_raw(refusal))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.forget(self)
        for cycle in (self._running, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        self._early.clear()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            self._ignored_bytes += len(data)
            if self._ignored_bytes > MAX_IGNORED_BYTES:
                self.end()
            return
        if self._is_answering:
            self._early += data
            if len(self._early) > MAX_HEAD_BYTES:
                self.end()
            return
        self._unset_keepalive_if_required()
        if self._head_since is None and not self._is_in_body:
            self._head_since = self.loop.time()
        self._feed(data)

    def pause_writing(self) -> None:
        self._stalled_since = self.loop.time()
        self._unsent_bytes = self.transport.get_write_buffer_size()
        super().pause_writing()

    def shutdown(self) -> None:
        if self._running is not None:
            self._running.keep_alive = False
        super().shutdown()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["connection"] = self
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        if not self._is_in_body:  # else the header is a trailer, which is ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop(InvalidRequest(f"At most {MAX_PIPELINED} requests may be pipelined."))
        super().on_headers_complete()
        self._is_in_body = True
        self._num_small_pieces = self._unread_body = 0
        self._unreported_bytes = 0
        self._waiting_since = self._head_since = None
        self._part_since, self._part_bytes = self.loop.time(), 0
        self._keep_reading()

    def on_body(self, body: bytes) -> None:
        self._unreported_bytes = 0
        self._part_bytes += len(body)
        if len(body) < SMALL_PIECE:
            self._num_small_pieces += 1
            if self._num_small_pieces > MAX_SMALL_PIECES:
                self._stop(InvalidRequest("The body comes in too many small chunks."))
        if self.cycle.response_complete:
            self._unread_body += len(body)
            if self._unread_body > MAX_UNREAD_BODY:
                self.end()
        super().on_body(body)
        self._keep_reading()

    def on_message_complete(self) -> None:
        self._is_in_body = False
        self._unreported_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_answering or self.transport.is_closing():
            return
        self._waiting_since = self.loop.time()
        if self._early:
            early = bytes(self._early)
            self._early.clear()
            self.loop.call_soon(self.data_received, early)

    def check(self, now: float) -> None:
        """Ends the connection if a head, a part of a body or a read is overdue."""
        limits = self._limits
        if self.flow.write_paused or self.transport.is_closing():
            self._check_reader(now)
        elif self._head_since is not None and now - self._head_since > limits.request_timeout:
            self._refuse(RequestTimeout("The request's head did not arrive in time."))
        elif self._is_in_body and now - self._part_since > limits.request_timeout:
            if self._part_bytes < FEWEST_BODY_BYTES and not self.flow.read_paused:
                self._refuse(RequestTimeout("The request's body did not arrive in time."))
            self._part_since, self._part_bytes = now, 0

    @property
    def _is_answering(self) -> bool:
        """Whether a request has been read but not answered."""
        running = self._running
        is_read = running is not None and not (running.response_complete or running.more_body)
        return is_read or bool(self.pipeline)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Callable[..., Any]) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _feed(self, data: bytes) -> None:
        self._unreported_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if self.cycle is not None:
                self.cycle.keep_alive = False  # what follows is in another protocol
        except httptools.HttpParserError:
            self._refuse(self._refusal or InvalidRequest("This is not a valid HTTP request."))
        if self._unreported_bytes > MAX_HEAD_BYTES:
            self._refuse(_too_large())

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            self._stop(_too_large())

    def _stop(self, refusal: ApiError) -> NoReturn:
        """Makes the parser stop; for the callbacks of the parser."""
        self._refusal = refusal
        raise refusal

    def _keep_reading(self) -> None:
        """Resumes reading, which uvicorn stops while requests are pipelined, to see a hang-up."""
        if self.pipeline:
            self.flow.resume_reading()

    def _check_reader(self, now: float) -> None:
        num_unsent = self.transport.get_write_buffer_size()
        if num_unsent < self._unsent_bytes or not self._stalled_since:
            self._stalled_since = now
        self._unsent_bytes = num_unsent
        if now - self._stalled_since > self._limits.send_timeout:
            self.end()

    def _refuse(self, error: ApiError) -> None:
        """Answers, unless another answer is being sent, and ends the connection."""
        if self._is_refused:
            return
        self._is_refused = True
        running = self._running
        has_begun = running is not None and running.response_started
        if self._is_answering or (has_begun and not running.response_complete):  # type: ignore[union-attr]
            return self.end()
        if running is not None:  # the request waits for its body
            running.disconnected = True
            running.message_event.set()
        self._head_since, self._is_in_body = None, False
        self.transport.write(_raw(error))
        # A client that is still sending would not see the answer of a closed connection.
        self.loop.call_later(LINGER_SECONDS, self.transport.close)


def _too_large() -> HeadTooLarge:
    return HeadTooLarge(f"The request line and headers may have at most {MAX_HEAD_BYTES} bytes.")


def _raw(error: ApiError) -> bytes:
    body = json.dumps(error.to_body()).encode()
    status = HTTPStatus(error.status)
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
