"""EngineClient: an engine in another process, as asyncio sees it. Torch-free."""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any, TypeVar, cast

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from loraplex.engine.errors import EngineError, EngineUnavailable, error_of
from loraplex.engine.protocol import (
    AbortRequest,
    AdapterInfo,
    AdapterRegistered,
    AdapterUnregistered,
    Command,
    EngineInfo,
    EngineStats,
    Event,
    FailureCode,
    GenerateRequest,
    GetStats,
    Hello,
    RegisterAdapter,
    RequestFailed,
    StartProgress,
    TokenEvent,
    UnregisterAdapter,
)

STARTING = "The engine is starting; try again shortly."
LOST = "The engine stopped before this request was complete; it restarts, try again shortly."

Inbox = asyncio.Queue[Event | EngineError]
Answer = TypeVar("Answer", bound=Event)
logger = logging.getLogger(__name__)


class EngineClient:
    """Connects, and connects again whenever the engine at this address restarts.

    Args:
        address: the ZeroMQ endpoint that the engine binds.
        prepare: awaited each time an engine has become ready, before any request is let through;
            it registers the adapters. It may call everything but `generate`. Where it returns
            False, none is let through.
        on_progress: told how far the engine's start is.
    """

    def __init__(
        self,
        address: str,
        prepare: Callable[["EngineClient"], Awaitable[bool]] | None = None,
        on_progress: Callable[[StartProgress], None] | None = None,
    ) -> None:
        self.address = address
        self.info: EngineInfo | None = None
        self.times_ready = 0
        self._prepare = prepare
        self._on_progress = on_progress
        self._inboxes: dict[str, Inbox] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[Event])
        self._ready = asyncio.Event()
        self._preparing: asyncio.Task[None] | None = None
        self._connected = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_alive(self) -> bool:
        """Whether requests are let through right now."""
        return self._ready.is_set()

    async def wait_ready(self) -> None:
        await self._ready.wait()

    async def start(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # keep nothing for an engine that is not there
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        self._monitor = self._socket.get_monitor_socket(
            zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
        )
        self._socket.connect(self.address)
        self._tasks = [
            asyncio.create_task(self._watch_connection()),
            asyncio.create_task(self._receive()),
        ]

    async def close(self) -> None:
        """Fails what is under way and ends the connection. The engine itself goes on."""
        self._lose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """Yields the events of all choices, until each has had its last.

        Closing or cancelling the iterator aborts the request.

        Raises:
            EngineUnavailable: if the engine is not ready, or ends meanwhile.
            RequestRejected: if it refuses the request or fails on it.
        """
        if not self.is_alive:
            raise EngineUnavailable(STARTING)
        open_choices = request.sampling.n
        with self._inbox(request.request_id) as inbox:
            try:
                self._send(request)
                while open_choices:
                    event = await _next(inbox, TokenEvent)
                    open_choices -= event.finish_reason is not None
                    yield event
            finally:
                if open_choices:
                    with contextlib.suppress(EngineUnavailable):
                        self._send(AbortRequest(request.request_id))

    async def register_adapter(self, command: RegisterAdapter) -> AdapterInfo:
        """Raises RequestRejected with every fault, or EngineUnavailable."""
        return (await self._ask(command.request_id, command, AdapterRegistered)).info

    async def unregister_adapter(self, command: UnregisterAdapter) -> None:
        """Returns once no sequence uses the adapter. Raises as `register_adapter` does."""
        await self._ask(command.request_id, command, AdapterUnregistered)

    async def stats(self) -> EngineStats:
        """Raises EngineUnavailable."""
        command = GetStats(f"stats-{uuid.uuid4().hex}")
        return await self._ask(command.request_id, command, EngineStats)

    async def _ask(self, request_id: str, command: Command, answer: type[Answer]) -> Answer:
        if self.info is None:
            raise EngineUnavailable(STARTING)
        with self._inbox(request_id) as inbox:
            self._send(command)
            return await _next(inbox, answer)

    @contextlib.contextmanager
    def _inbox(self, request_id: str) -> Iterator[Inbox]:
        inbox: Inbox = asyncio.Queue()
        self._inboxes[request_id] = inbox
        try:
            yield inbox
        finally:
            del self._inboxes[request_id]

    def _send(self, command: Command) -> None:
        # With no high-water mark a connected socket takes it at once, so nothing is awaited.
        sent = self._socket.send(self._encoder.encode(command), zmq.NOBLOCK)
        if cast("asyncio.Future[None]", sent).exception() is not None:
            raise EngineUnavailable(LOST)

    async def _receive(self) -> None:
        while True:
            for event in self._decoder.decode(await self._socket.recv()):
                self._take(event)
            await asyncio.sleep(0)  # awaiting a message that is there already lets nobody else run

    def _take(self, event: Event) -> None:
        match event:
            case StartProgress():
                if self._on_progress is not None:
                    self._on_progress(event)
            case EngineInfo():
                if self._connected:
                    self._preparing = asyncio.create_task(self._become_ready(event))
            case _:
                if (
                    isinstance(event, RequestFailed)
                    and event.code is FailureCode.ENGINE_UNAVAILABLE
                ):
                    self._ready.clear()  # it is about to end
                if (inbox := self._inboxes.get(event.request_id)) is not None:
                    inbox.put_nowait(event)

    async def _become_ready(self, info: EngineInfo) -> None:
        self.info = info
        try:
            is_prepared = self._prepare is None or await self._prepare(self)
        except EngineUnavailable:
            return  # it ended again; its successor is prepared anew
        except Exception:
            logger.exception("The engine started, but could not be prepared")
            return
        if is_prepared:
            self.times_ready += 1
            self._ready.set()

    async def _watch_connection(self) -> None:
        while True:
            message: Any = await recv_monitor_message(self._monitor)
            if message["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._connected = True
                self._send(Hello())
            else:
                self._lose()

    def _lose(self) -> None:
        self._connected = False
        self._ready.clear()
        self.info = None
        if self._preparing is not None:
            self._preparing.cancel()
        for inbox in self._inboxes.values():
            inbox.put_nowait(EngineUnavailable(LOST))


async def _next(inbox: Inbox, kind: type[Answer]) -> Answer:
    event = await inbox.get()
    if isinstance(event, EngineError):
        raise event
    if isinstance(event, RequestFailed):
        raise error_of(event)
    if not isinstance(event, kind):
        raise EngineUnavailable(f"The engine answered with a {type(event).__name__}.")
    return event
