"""ServerSocket: the engine's end of the socket; sends each event to the client that it belongs to.
Torch-free."""

import logging
from collections import defaultdict
from collections.abc import Iterator

import msgspec
import zmq

from loraplex.engine.protocol import (
    AbortRequest,
    Command,
    EngineInfo,
    Event,
    FailureCode,
    GenerateRequest,
    Hello,
    RequestFailed,
    StartProgress,
    TokenEvent,
)

logger = logging.getLogger(__name__)


class _Envelope(msgspec.Struct):
    """The fields that can be read even of an invalid command."""

    request_id: str = ""


class ServerSocket:
    """Receives commands from any number of clients, and sends each event to the client that it
    belongs to.

    Args:
        address: a ZeroMQ endpoint to bind, such as "ipc:///run/engine.sock".
    """

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # tell when a client has gone
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._encoder = msgspec.msgpack.Encoder()
        self._clients: set[bytes] = set()
        self._owners: dict[str, bytes] = {}
        self._open_choices: dict[str, int] = {}
        self._news: StartProgress | EngineInfo | None = None

    @property
    def open_requests(self) -> list[str]:
        """Returns the ids of the requests that have not had their last event."""
        return list(self._owners)

    def wait(self, timeout_ms: int) -> None:
        """Returns when a command has arrived, or after `timeout_ms`."""
        self._socket.poll(timeout_ms)

    def receive(self) -> Iterator[Command]:
        """Yields the commands that have arrived; those not consumed stay queued.

        A `Hello` is answered here. Commands that cannot be read are refused here.
        """
        while True:
            try:
                client, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 1:
                logger.error("Dropped a message of %d frames; commands have one", len(frames))
            elif (command := self._open(client, frames[0])) is not None:
                yield command

    def send(self, events: list[Event]) -> list[str]:
        """Sends events; returns the ids of requests whose client is gone."""
        batches: dict[bytes, list[Event]] = defaultdict(list)
        for event in events:
            if isinstance(event, StartProgress | EngineInfo):
                self._news = event
                for client in self._clients:
                    batches[client].append(event)
            elif (owner := self._owners.get(event.request_id)) is not None:
                batches[owner].append(event)
                self._note_end(event)
        lost = [client for client, batch in batches.items() if not self._deliver(client, batch)]
        return [request_id for client in lost for request_id in self._forget(client)]

    def close(self) -> None:
        """Closes the socket after sending what is under way, for at most a second."""
        self._socket.close(linger=1000)
        self._context.term()

    def _open(self, client: bytes, frame: bytes) -> Command | None:
        try:
            command = self._decoder.decode(frame)
        except (msgspec.MsgspecError, RecursionError) as error:
            self._refuse(client, frame, str(error))
            return None
        if isinstance(command, Hello):
            self._clients.add(client)
            if self._news is not None:
                self._deliver(client, [self._news])
            return None
        if isinstance(command, AbortRequest):
            self._drop(command.request_id)
        else:
            if command.request_id in self._owners:
                self._refuse(client, frame, "this request id is in use")
                return None
            self._owners[command.request_id] = client
            if isinstance(command, GenerateRequest):
                self._open_choices[command.request_id] = command.num_open_choices
        return command

    def _refuse(self, client: bytes, frame: bytes, reason: str) -> None:
        logger.error("Refused a command: %s", reason)
        try:
            request_id = msgspec.msgpack.decode(frame, type=_Envelope).request_id
        except (msgspec.MsgspecError, RecursionError):
            return
        message = f"The engine cannot read this request: {reason}"
        failure = RequestFailed(
            request_id=request_id, code=FailureCode.INVALID_REQUEST, message=message
        )
        self._deliver(client, [failure])

    def _deliver(self, client: bytes, batch: list[Event]) -> bool:
        try:
            self._socket.send_multipart([client, self._encoder.encode(batch)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.info("A client has gone: %s", error)
            return False
        return True

    def _note_end(self, event: Event) -> None:
        if isinstance(event, StartProgress | EngineInfo):
            return
        if isinstance(event, TokenEvent):
            if event.finish_reason is None:
                return
            self._open_choices[event.request_id] -= 1
            if self._open_choices[event.request_id]:
                return
        self._drop(event.request_id)

    def _drop(self, request_id: str) -> None:
        self._owners.pop(request_id, None)
        self._open_choices.pop(request_id, None)

    def _forget(self, client: bytes) -> list[str]:
        self._clients.discard(client)
        left = [request_id for request_id, owner in self._owners.items() if owner == client]
        for request_id in left:
            self._drop(request_id)
        return left
