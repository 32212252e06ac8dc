"""Sends an answer, whole or as server-sent events, until the client hangs up."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Protocol

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from loraplex.platform.errors import ClientGone, Unavailable
from loraplex.platform.http.error_handlers import api_error_of
from loraplex.platform.http.protocol import ClientConnection
from loraplex.platform.inference.answers.responses import Usage
from loraplex.platform.inference.answers.results import ChoiceResult, UsageTally, collect
from loraplex.platform.inference.answers.unsent import Unsent
from loraplex.platform.inference.generation import ChoiceEvent, Generation
from loraplex.platform.inference.waiting import unless_gone

DONE = b"data: [DONE]\n\n"
# Characters at which some clients end a line; in JSON they only occur inside of texts.
LINE_ENDS = [(end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\u0085\u2028\u2029"]

Events = AsyncGenerator[ChoiceEvent, None]
_encode = msgspec.json.Encoder().encode


class Renderer(Protocol):
    """Renders events in the shapes of one route."""

    def whole(self, results: list[ChoiceResult], usage: Usage) -> msgspec.Struct: ...
    def chunks(self, item: ChoiceEvent, tally: UsageTally) -> Iterator[msgspec.Struct]: ...
    def last(self, usage: Usage) -> msgspec.Struct: ...


class EventStream(Response):
    """A stream that closes its source however it ends, so that the request behind it is aborted.

    Args:
        max_unread: bytes that are buffered for a slow client; a client with more is cut off.
    """

    media_type = "text/event-stream"

    def __init__(
        self, request: Request, frames: AsyncGenerator[bytes, None], max_unread: int
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._request = request
        self._frames = frames
        self._max_unread = max_unread

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._frames):
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            try:
                await unless_gone(self._request, self._send_frames(send))
            except ClientGone:
                return
            except Unavailable as stopping:
                await _send(send, _frame(stopping.to_body()))
            await _send(send, b"", is_last=True)

    async def _send_frames(self, send: Send) -> None:
        connection: ClientConnection = self._request.state.connection
        async for frame in self._frames:
            if connection.is_stalled:
                return await self._send_slowly(send, frame, connection)
            await _send(send, frame)

    async def _send_slowly(self, send: Send, frame: bytes, connection: ClientConnection) -> None:
        """Sends to a client that is behind, and reads events from the engine at the same time, so
        that the unsent bytes can be counted."""
        unsent = Unsent(self._max_unread)
        unsent.add(frame)

        async def gather() -> None:
            try:
                async for later in self._frames:
                    if not unsent.add(later):
                        return connection.end()
            finally:
                unsent.close()

        gathering = asyncio.create_task(gather())
        try:
            while content := await unsent.take():
                await _send(send, content)
        finally:
            gathering.cancel()
            await asyncio.gather(gathering, return_exceptions=True)


async def answer_whole(
    request: Request, generation: Generation, events: Events, renderer: Renderer
) -> Response:
    """Returns the whole answer.

    Raises:
        ClientGone: if the client hangs up.
    """
    async with contextlib.aclosing(events):
        results, usage = await unless_gone(request, collect(generation, events))
    return Response(_encode(renderer.whole(results, usage)), media_type="application/json")


async def answer_stream(
    request: Request,
    generation: Generation,
    events: Events,
    renderer: Renderer,
    include_usage: bool,
) -> Response:
    """Returns the stream after its first event, so that an early refusal has its own status.

    Raises:
        ClientGone: if the client hangs up before the first event.
    """
    try:
        first = await unless_gone(request, anext(events))
    except BaseException:
        await events.aclose()
        raise
    frames = _frames(first, events, renderer, UsageTally(generation), include_usage)
    return EventStream(request, frames, request.app.state.deployment.settings.max_unread)


async def _frames(
    first: ChoiceEvent, rest: Events, renderer: Renderer, tally: UsageTally, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Yields server-sent events; the last are the usage, if asked for, and [DONE], or an error."""
    item: ChoiceEvent | None = first
    try:
        async with contextlib.aclosing(rest):
            while item is not None:
                tally.add(item)
                if frame := b"".join(_frame(chunk) for chunk in renderer.chunks(item, tally)):
                    yield frame
                item = await anext(rest, None)
    except Exception as error:
        yield _frame(api_error_of(error).to_body())
        return
    yield (_frame(renderer.last(tally.total)) if include_usage else b"") + DONE


def _frame(content: object) -> bytes:
    data: bytes = _encode(content)
    for raw, escaped in LINE_ENDS:
        data = data.replace(raw, escaped)
    return b"data: " + data + b"\n\n"


async def _send(send: Send, content: bytes, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": content, "more_body": not is_last})
