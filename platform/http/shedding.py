"""Shedding: refuses requests cheaply while there is no engine."""

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.engine.errors import EngineUnavailable
from loraplex.platform.http.error_handlers import api_error_of, error_response

GENERATING = ("/v1/chat/completions", "/v1/completions")


class Shedding:
    """Answers 503 for the routes that generate without reading the body, since clients that retry
    must not take the processor from the engine that starts.

    Args:
        refuse_unless_ready: raises EngineUnavailable while there is no engine.
    """

    def __init__(self, app: ASGIApp, refuse_unless_ready: Callable[[], None]) -> None:
        self._app = app
        self._refuse_unless_ready = refuse_unless_ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in GENERATING and scope["method"] == "POST":
            try:
                self._refuse_unless_ready()
            except EngineUnavailable as error:
                return await error_response(api_error_of(error))(scope, receive, send)
        await self._app(scope, receive, send)
