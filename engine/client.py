"""EngineClient: the platform's end of the connection to an engine process. Torch-free."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from loraplex.engine.errors import EngineError, EngineUnavailable, error_of
from loraplex.engine.protocol import (
    AbortRequest,
    AdapterInfo,
    AdapterRegistered,
    AdapterUnregistered,
    BasePromptInfo,
    BasePromptPublished,
    BasePromptRetired,
    BlockMap,
    Command,
    EngineInfo,
    EngineStats,
    Event,
    FailureCode,
    GenerateRequest,
    GetBlockMap,
    GetStats,
    Hello,
    PublishBasePrompt,
    RegisterAdapter,
    RequestFailed,
    RetireBasePrompt,
    SetTenantShares,
    StartProgress,
    TenantShare,
    TenantSharesSet,
    TokenEvent,
    UnregisterAdapter,
)


class SocketReader:
    """Calls `take` with the frames of each message, at once and on the event loop.

    ZeroMQ's own asyncio sockets make two futures per message, which is too slow for tokens.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", take: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._drain)
        self.look()

    def look(self) -> None:
        """Reads what has arrived; called after each send, which can consume the notification."""
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Stops reading; to be called before the socket is closed."""
        self._loop.remove_reader(self._descriptor)

    def _drain(self) -> None:
        """Reads all waiting messages: the descriptor signals once, not for as long as there are
        some."""
        while not self._socket.closed:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)


STARTING = "The engine is starting; try again shortly."
SENT_AT_ONCE = 2**15  # tokens of prompts that are sent before other tasks run
FIRST_START_SECONDS = 10.0  # a guess, until a start has been seen
LOST = "The engine stopped before this request was complete; it restarts, try again shortly."

Inbox = asyncio.Queue[Event | EngineError]
Answer = TypeVar("Answer", bound=Event)
logger = logging.getLogger(__name__)


class EngineClient:
    """Connects to an engine, and again whenever the engine at this address restarts.

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
        self._is_ready = False
        self._decided = asyncio.Event()  # set while it is ready, and once it is given up
        self._start_seconds = FIRST_START_SECONDS  # that the last start took
        self._starting_since = time.monotonic()
        self._preparing: asyncio.Task[None] | None = None
        self._connected = False

    @property
    def is_alive(self) -> bool:
        """Returns whether requests are accepted right now."""
        return self._is_ready

    @property
    def is_given_up(self) -> bool:
        """Returns whether no engine will come any more."""
        return self._decided.is_set() and not self._is_ready

    @property
    def retry_after(self) -> float:
        """Returns the seconds until an engine can be expected to be ready, from the duration of the
        last start."""
        elapsed = time.monotonic() - self._starting_since
        return 0.0 if self._is_ready else max(1.0, self._start_seconds - elapsed)

    def refuse_unless_ready(self) -> None:
        """Raises EngineUnavailable where requests are not accepted."""
        if not self._is_ready:
            raise EngineUnavailable(STARTING, self.retry_after)

    async def wait_ready(self) -> None:
        """Waits until requests are accepted. Raises EngineUnavailable once the engine is given
        up."""
        while not self._is_ready:
            if self.is_given_up:
                raise EngineUnavailable(LOST)
            await self._decided.wait()

    def give_up(self) -> None:
        """Gives the engine up for good, and fails everything that waits for it."""
        self._is_ready = False
        self._decided.set()

    async def start(self) -> None:
        self._context = zmq.Context()
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
        self._reader = SocketReader(self._socket, self._receive)
        self._changes = SocketReader(self._monitor, self._note_connection)
        self._socket.connect(self.address)

    async def close(self) -> None:
        """Fails the requests under way and closes the connection. The engine itself goes on."""
        self.give_up()
        self._lose()
        self._changes.close()
        self._reader.close()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    async def generate(self, *requests: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """Yields the events of all choices of all requests, until each choice has had its last
        event.

        Closing or cancelling the iterator aborts the requests that still run.

        Raises:
            EngineUnavailable: if the engine is not ready, or ends meanwhile.
            RequestRejected: as soon as it refuses one of the requests or fails on it.
        """
        self.refuse_unless_ready()
        open_choices = {request.request_id: request.num_open_choices for request in requests}
        with self._inbox(*open_choices) as inbox:
            try:
                await self._send_all(requests)
                while open_choices:
                    event = await _next(inbox, TokenEvent)
                    if event.finish_reason is not None:
                        _count_down(open_choices, event.request_id)
                    yield event
            finally:
                with contextlib.suppress(EngineUnavailable):
                    for request_id in open_choices:
                        self._send(AbortRequest(request_id))

    async def register_adapter(self, command: RegisterAdapter) -> AdapterInfo:
        """Registers an adapter. Raises RequestRejected with every fault, or EngineUnavailable."""
        return (await self._ask(command.request_id, command, AdapterRegistered)).info

    async def unregister_adapter(self, command: UnregisterAdapter) -> None:
        """Unregisters an adapter; returns once no sequence uses it. Raises as `register_adapter`
        does."""
        await self._ask(command.request_id, command, AdapterUnregistered)

    async def publish_base_prompt(self, command: PublishBasePrompt) -> BasePromptInfo:
        """Publishes a base prompt; returns once it is computed. Raises as `register_adapter`
        does."""
        return (await self._ask(command.request_id, command, BasePromptPublished)).info

    async def retire_base_prompt(self, command: RetireBasePrompt) -> None:
        """Retires a base prompt; returns once no request uses it. Raises as `register_adapter`
        does."""
        await self._ask(command.request_id, command, BasePromptRetired)

    async def set_tenant_shares(self, shares: list[TenantShare]) -> None:
        """Sets tenants' shares, all or none. Raises as `register_adapter` does."""
        command = SetTenantShares(f"shares-{uuid.uuid4().hex}", shares)
        await self._ask(command.request_id, command, TenantSharesSet)

    async def block_map(self) -> BlockMap:
        """Returns the map of all KV blocks. Raises EngineUnavailable."""
        command = GetBlockMap(f"blocks-{uuid.uuid4().hex}")
        return await self._ask(command.request_id, command, BlockMap)

    async def stats(self) -> EngineStats:
        """Returns the engine's statistics. Raises EngineUnavailable."""
        command = GetStats(f"stats-{uuid.uuid4().hex}")
        return await self._ask(command.request_id, command, EngineStats)

    async def _send_all(self, requests: Sequence[GenerateRequest]) -> None:
        """Sends all requests to one engine, and lets other tasks run in between.

        Raises:
            EngineUnavailable: if the engine ends meanwhile.
        """
        engine, num_tokens = self.times_ready, 0
        for request in requests:
            if num_tokens >= SENT_AT_ONCE:
                num_tokens = 0
                await asyncio.sleep(0)
                if not self._is_ready or self.times_ready != engine:
                    raise EngineUnavailable(LOST, self.retry_after)
            self._send(request)
            num_tokens += len(request.prompt_token_ids)

    async def _ask(self, request_id: str, command: Command, answer: type[Answer]) -> Answer:
        if self.info is None:
            raise EngineUnavailable(STARTING, self.retry_after)
        with self._inbox(request_id) as inbox:
            self._send(command)
            return await _next(inbox, answer)

    @contextlib.contextmanager
    def _inbox(self, *request_ids: str) -> Iterator[Inbox]:
        """Opens one inbox for all these requests."""
        inbox: Inbox = asyncio.Queue()
        self._inboxes |= dict.fromkeys(request_ids, inbox)
        try:
            yield inbox
        finally:
            for request_id in request_ids:
                del self._inboxes[request_id]

    def _send(self, command: Command) -> None:
        try:
            self._socket.send(self._encoder.encode(command), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # there is no high-water mark, so it can only be gone
            raise EngineUnavailable(LOST) from error
        self._reader.look()

    def _receive(self, frames: list[bytes]) -> None:
        for event in self._decoder.decode(frames[0]):
            self._take(event)

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
                    self._note_end()  # it is about to
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
            self._start_seconds = time.monotonic() - self._starting_since
            self._is_ready = True
            self._decided.set()

    def _note_end(self) -> None:
        """Fails all open requests and accepts no others until the next engine is ready."""
        if self._is_ready:
            self._is_ready = False
            self._decided.clear()
            self._starting_since = time.monotonic()

    def _note_connection(self, frames: list[bytes]) -> None:
        if parse_monitor_message(frames)["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._connected = True
            with contextlib.suppress(EngineUnavailable):  # it has gone again, and comes back
                self._send(Hello())
        else:
            self._lose()

    def _lose(self) -> None:
        self._connected = False
        self._note_end()
        self.info = None
        if self._preparing is not None:
            self._preparing.cancel()
        for inbox in self._inboxes.values():
            inbox.put_nowait(EngineUnavailable(LOST, self.retry_after))


async def _next(inbox: Inbox, kind: type[Answer]) -> Answer:
    event = await inbox.get()
    if isinstance(event, EngineError):
        raise event
    if isinstance(event, RequestFailed):
        raise error_of(event)
    if not isinstance(event, kind):
        raise EngineUnavailable(f"The engine answered with a {type(event).__name__}.")
    return event


def _count_down(open_choices: dict[str, int], request_id: str) -> None:
    open_choices[request_id] -= 1
    if not open_choices[request_id]:
        del open_choices[request_id]
