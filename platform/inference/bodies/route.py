"""JsonRoute: a route that reads, bounds and checks the body before FastAPI sees the request."""

import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from loraplex.platform.errors import InvalidRequest
from loraplex.platform.inference.bodies.budget import MemoryBudget, Room
from loraplex.platform.inference.bodies.parsing import Body, parse
from loraplex.platform.inference.bodies.process import ParsingProcess
from loraplex.platform.inference.waiting import unless_gone, unless_stopping

BODIES_AT_ONCE = 16  # bodies of the largest size that fit into memory
FREE_BYTES = 2**16  # of a body that is not counted
# Limits of bodies that are parsed on the event loop, in some milliseconds at most.
MAX_BYTES, MAX_VALUES, MAX_CONTAINERS = 2**20, 20_000, 1_000


class BodyReader:
    """Room for bodies and a process for large ones, which all routes share."""

    def __init__(self, max_body_size: int) -> None:
        self._max_body_size = max_body_size
        max_bytes = BODIES_AT_ONCE * max_body_size
        self._budget = MemoryBudget(max_bytes, max_bytes // 2)
        self._process = ParsingProcess()

    def close(self) -> None:
        self._process.close()

    @contextlib.asynccontextmanager
    async def read(self, request: Request, kind: type[Body]) -> AsyncIterator[Body]:
        """Yields the request's body, which holds room until the context ends.

        Raises:
            InvalidRequest: if the body is invalid.
            ClientGone: if the client hangs up.
        """
        _check_content_type(request)
        tenant: str = request.state.principal.tenant
        async with contextlib.AsyncExitStack() as stack:
            size = self._size(request)
            room: Room | None = None
            if size > FREE_BYTES:
                hold = self._budget.hold(tenant, size)
                room = await unless_stopping(request, stack.enter_async_context(hold))
            content = await unless_stopping(request, request.body())
            if room is not None:  # a body in chunks does not announce its size
                self._budget.shrink(room, len(content) if len(content) > FREE_BYTES else 0)
            if _is_small(content):
                yield parse(kind, content)
            else:
                parsing = self._process.parse(tenant, kind, content, _max_tokens(request))
                del content
                yield await unless_gone(request, parsing)

    def _size(self, request: Request) -> int:
        announced = request.headers.get("content-length", "")
        size = int(announced) if announced.isdecimal() else self._max_body_size
        return min(size, self._max_body_size)


class JsonRoute(APIRoute):
    """A route whose body is read by the application's `BodyReader`."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        kind: Any = self.body_field.field_info.annotation

        async def read_first(request: Request) -> Response:
            reader: BodyReader = request.app.state.bodies
            async with reader.read(request, kind) as body:
                return await handle(_ReadRequest(request, body))

        return read_first


class _ReadRequest(Request):
    """A request whose body is a checked object, which FastAPI does not parse."""

    def __init__(self, request: Request, body: object) -> None:
        super().__init__(request.scope, request.receive)
        self._checked = body

    async def body(self) -> bytes:
        return b"{}"

    async def json(self) -> Any:
        return self._checked


def _check_content_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind.startswith("application/") and kind.removeprefix("application/").split("+")[-1]
    if is_json != "json":
        raise InvalidRequest(
            "The body must be a JSON object, sent with content-type application/json"
        )


def _max_tokens(request: Request) -> int:
    """Returns the maximum length of a prompt, as far as it is known before the engine is ready."""
    info = request.app.state.deployment.engine.info
    return sys.maxsize if info is None else int(info.max_model_len)


def _is_small(content: bytes) -> bool:
    return (
        len(content) <= MAX_BYTES
        and content.count(b",") <= MAX_VALUES
        and content.count(b"{") + content.count(b"[") <= MAX_CONTAINERS
    )
