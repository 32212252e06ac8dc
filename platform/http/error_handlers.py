"""Turns every error into an OpenAI error object; no other module does."""

import json
import logging
from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from loraplex.engine.errors import EngineError, EngineUnavailable, PromptRejected, RequestRejected
from loraplex.engine.protocol import FailureCode
from loraplex.platform.errors import (
    MAX_FAULTS,
    ApiError,
    BodyTooLarge,
    ClientGone,
    Fault,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    RequestQuarantined,
    Unavailable,
    Unprocessable,
)
from loraplex.platform.http.faults import fault_of

CLIENT_CLOSED_REQUEST = 499  # nobody reads it

logger = logging.getLogger(__name__)

FAILURES: dict[FailureCode, Callable[[RequestRejected], ApiError]] = {
    FailureCode.INVALID_REQUEST: lambda e: InvalidRequest(e.message, e.param),
    FailureCode.CONTEXT_LENGTH_EXCEEDED: lambda e: InvalidRequest(
        e.message, e.param, "context_length_exceeded"
    ),
    FailureCode.BUDGET_EXCEEDED: lambda e: InvalidRequest(e.message, e.param, "budget_exceeded"),
    FailureCode.QUEUE_FULL: lambda e: Unavailable(e.message, code="queue_full"),
    FailureCode.ADAPTER_NOT_FOUND: lambda e: NotFound(e.message, "model", "model_not_found"),
    FailureCode.ADAPTER_REJECTED: lambda e: Unprocessable(e.message, e.param),
    FailureCode.ADAPTER_UNAVAILABLE: lambda e: Unavailable(
        e.message, "model", "adapter_unavailable"
    ),
    FailureCode.BASE_PROMPT_NOT_FOUND: lambda e: NotFound(
        e.message, "base_prompt", "base_prompt_not_found"
    ),
    FailureCode.ENGINE_UNAVAILABLE: lambda e: Unavailable(e.message),
    FailureCode.REQUEST_QUARANTINED: lambda e: RequestQuarantined(e.message),
    FailureCode.INTERNAL: lambda e: InternalError(e.message),
}


def add_error_handlers(app: FastAPI) -> None:
    for kind in (ApiError, EngineError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _handle)
    for kind in (ClientGone, ClientDisconnect):
        app.add_exception_handler(kind, _leave)


def api_error_of(error: Exception) -> ApiError:
    """Returns what a caller is told of any exception; an unexpected one is logged."""
    match error:
        case ApiError():
            return error
        case EngineError():
            return _of_engine(error)
        case RequestValidationError():
            details = error.errors()
            return InvalidRequest.of([fault_of(it) for it in details[:MAX_FAULTS]], len(details))
        case HTTPException():
            return _of_http(error)
        case _:
            logger.error("A request failed", exc_info=error)
            return InternalError()


def error_response(error: ApiError) -> Response:
    """Returns the answer for an error, in ASCII, since its message may quote invalid text."""
    body = json.dumps(error.to_body())
    return Response(body, error.status, error.headers, "application/json")


def _of_engine(error: EngineError) -> ApiError:
    match error:
        case RequestRejected():
            api_error = FAILURES[error.code](error)
            api_error.faults = [Fault(error.param, fault) for fault in error.faults]
            return api_error
        case PromptRejected():
            return InvalidRequest(error.message, "messages")
        case EngineUnavailable():
            return Unavailable.for_seconds(error.retry_after, error.message)
        case _:
            return Unavailable(error.message)


def _of_http(error: HTTPException) -> ApiError:
    match error.status_code:
        case 404:
            return NotFound("There is nothing at this path.")
        case 405:
            return MethodNotAllowed("This path does not take this method.")
        case 413:
            return BodyTooLarge(error.detail)
        case _:
            return InvalidRequest(error.detail)


async def _handle(request: Request, error: Exception) -> Response:
    return error_response(api_error_of(error))


async def _leave(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
