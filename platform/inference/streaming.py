"""How an answer leaves: whole or as server-sent events, and not at all once the client has gone."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Iterator
from typing import Protocol, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Send

from loraplex.platform.http.error_handlers import api_error_of
from loraplex.platform.inference.generation import ChoiceEvent, Generation
from loraplex.platform.inference.responses import Usage
from loraplex.platform.inference.results import ChoiceResult, UsageTally, collect

DONE = b"data: [DONE]\n\n"
CLIENT_CLOSED_REQUEST = 499  # nobody reads it

Result = TypeVar("Result")
Events = AsyncGenerator[ChoiceEvent, None]
_encode = msgspec.json.Encoder().encode


class Renderer(Protocol):
    """Turns events into one route's shapes."""

    def whole(self, results: list[ChoiceResult], usage: Usage) -> msgspec.Struct: ...
    def chunks(self, item: ChoiceEvent) -> Iterator[msgspec.Struct]: ...
    def last(self, usage: Usage) -> msgspec.Struct: ...


class ClientGone(Exception):
    pass


class EventStream(StreamingResponse):
    """Closes its source whichever way it ends, so that the request behind it is aborted."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None]) -> None:
        super().__init__(frames, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._frames = frames

    async def stream_response(self, send: Send) -> None:
        async with contextlib.aclosing(self._frames):
            await super().stream_response(send)


async def answer_whole(
    request: Request, generation: Generation, events: Events, renderer: Renderer
) -> Response:
    try:
        async with contextlib.aclosing(events):
            results, usage = await unless_gone(request, collect(generation, events))
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return Response(_encode(renderer.whole(results, usage)), media_type="application/json")


async def answer_stream(
    request: Request,
    generation: Generation,
    events: Events,
    renderer: Renderer,
    include_usage: bool,
) -> Response:
    """Waits for the first event, so that what is refused at once still gets its own status."""
    try:
        first = await unless_gone(request, anext(events))
    except ClientGone:
        await events.aclose()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return EventStream(_frames(first, events, renderer, UsageTally(generation), include_usage))


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """Awaits the work; cancels it as soon as the client hangs up.

    Raises:
        ClientGone: in that case.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.create_task(_hang_up(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _frames(
    first: ChoiceEvent, rest: Events, renderer: Renderer, tally: UsageTally, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Ends with the usage, where it is asked for, and [DONE]; or with the error that ended it."""
    item: ChoiceEvent | None = first
    try:
        async with contextlib.aclosing(rest):
            while item is not None:
                tally.add(item)
                if frame := b"".join(_frame(chunk) for chunk in renderer.chunks(item)):
                    yield frame
                item = await anext(rest, None)
    except Exception as error:
        yield _frame(api_error_of(error).to_body())
        return
    yield (_frame(renderer.last(tally.total)) if include_usage else b"") + DONE


def _frame(content: object) -> bytes:
    return b"data: " + _encode(content) + b"\n\n"
