"""Middleware that every HTTP request passes before its route: id, key and size limit."""

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.platform.auth.principal import Authenticator
from loraplex.platform.errors import Unauthenticated
from loraplex.platform.http.error_handlers import error_response

REQUEST_ID_HEADER = "x-request-id"
PROTECTED = "/v1/"
DRAIN_FACTOR = 8  # how many times the limit is read of a refused body, so its client sees why


class RequestId:
    """Gives each request an id made by the server, and returns it in the answer's headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request_id = scope.setdefault("state", {})["request_id"] = f"req_{uuid.uuid4().hex}"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class Authentication:
    """Refuses callers without a valid key before anything reads their body."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        self._app = app
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(PROTECTED):
            try:
                scope["state"]["principal"] = self._authenticator.authenticate(_key_of(scope))
            except Unauthenticated as error:
                return await error_response(error)(scope, receive, send)
        await self._app(scope, receive, send)


def _key_of(scope: Scope) -> str | None:
    """Returns the Authorization header, or its equivalent for an X-Api-Key header."""
    headers = Headers(scope=scope)
    key = headers.get("x-api-key")
    return headers.get("authorization") or (None if key is None else f"Bearer {key}")


class BodyLimit:
    """Refuses bodies above a number of bytes, whether or not they announce their length."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes <= self._max_bytes:
                return message
            # A client that is still sending would not see the answer.
            while message.get("more_body") and num_bytes < DRAIN_FACTOR * self._max_bytes:
                message = await receive()
                num_bytes += len(message.get("body", b""))
            raise HTTPException(413, f"The body may have at most {self._max_bytes} bytes.")

        await self._app(scope, receive_limited, send)
