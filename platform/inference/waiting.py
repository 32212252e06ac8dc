"""Runs a request's work until its client hangs up or the server stops."""

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from fastapi import Request

from loraplex.platform.errors import ClientGone, Unavailable

STOPPING = "The server is stopping; try again later or elsewhere."

Result = TypeVar("Result")


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """Awaits the work, and cancels it as soon as the client hangs up or the server must stop; for
    requests whose body has been read.

    Raises:
        ClientGone: if the client hung up.
        Unavailable: if the server stops.
    """
    return await _unless(work, {_hang_up(request): ClientGone(), _stop(request): _stopping()})


async def unless_stopping(request: Request, work: Awaitable[Result]) -> Result:
    """Awaits the work, and cancels it as soon as the server must stop.

    Raises:
        Unavailable: if the server stops.
    """
    return await _unless(work, {_stop(request): _stopping()})


async def _unless(
    work: Awaitable[Result], interruptions: dict[Coroutine[Any, Any, None], Exception]
) -> Result:
    working = asyncio.ensure_future(work)
    watching = {asyncio.create_task(watch): error for watch, error in interruptions.items()}
    try:
        await asyncio.wait({working, *watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise next(error for task, error in watching.items() if task.done())
    finally:
        for task in (working, *watching):
            task.cancel()
        await asyncio.gather(working, *watching, return_exceptions=True)


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stop(request: Request) -> None:
    await request.app.state.stopping.wait()


def _stopping() -> Unavailable:
    return Unavailable(STOPPING)
