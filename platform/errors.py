"""The platform's errors, and how a caller sees them.

    PlatformError
    ├── SettingsRefused        the server cannot start with these settings
    ├── StartFailed            the server has started but cannot serve
    ├── ClientGone             a caller has hung up
    └── ApiError               has an HTTP status and becomes an OpenAI error object
        ├── InvalidRequest     400, with every fault
        ├── Unauthenticated    401
        ├── Forbidden          403
        ├── ModelNotFound      404
        ├── BasePromptNotFound 404
        ├── NotFound           404
        ├── MethodNotAllowed   405
        ├── RequestTimeout     408
        ├── Conflict           409
        ├── BodyTooLarge       413
        ├── Unprocessable      422
        ├── TooManyRequests    429
        ├── HeadTooLarge       431
        ├── InternalError      500
        ├── RequestQuarantined 500
        ├── TooManyConnections 503
        └── Unavailable        503

Messages of `ApiError` reach a tenant, so they hold no path and no trace.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

MAX_FAULTS = 10  # of a request that an answer lists; further ones are counted
MAX_LISTED = 50  # faults of an adapter that an answer lists
MAX_MESSAGE, MAX_PARAM = 500, 100  # characters that an answer shows


class Fault(NamedTuple):
    param: str | None
    message: str

    @property
    def shown(self) -> "Fault":
        """The fault with long quotations cut short."""
        param = None if self.param is None else clip(self.param, MAX_PARAM)
        return Fault(param, clip(self.message, MAX_MESSAGE))


def clip(text: str, limit: int) -> str:
    """Returns the text, or its beginning and its length if it is too long."""
    if len(text) <= limit:
        return text
    end = f"… ({len(text)} characters)"
    return text[: limit - len(end)] + end


class PlatformError(Exception):
    """Base class of the platform's errors."""


class SettingsRefused(PlatformError):
    """The server cannot start with these settings; each fault is one line for the operator."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = list(faults)
        super().__init__("; ".join(faults))


class StartFailed(PlatformError):
    """The server has started but cannot serve; each fault is one line for the operator."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = list(faults)
        super().__init__("; ".join(faults))


class ClientGone(PlatformError):
    """The client has hung up, and nobody reads the answer."""


class ApiError(PlatformError):
    """An error with an HTTP status and the fields of an OpenAI error object."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        self.message = message
        self.param = param
        self.code = code or self.code
        self.faults: list[Fault] = []
        self.num_faults = 0  # all faults, if there are more than are listed
        super().__init__(message)

    @property
    def headers(self) -> dict[str, str]:
        return {}

    def to_body(self) -> dict[str, object]:
        error: dict[str, object] = {
            "message": clip(self.message, MAX_FAULTS * MAX_MESSAGE),
            "type": self.type,
            "param": self.param and clip(self.param, MAX_PARAM),
            "code": self.code,
        }
        if len(self.faults) > 1:
            error["faults"] = [fault.shown._asdict() for fault in self.faults[:MAX_LISTED]]
        if self.num_faults > len(self.faults[:MAX_LISTED]):
            error["num_faults"] = self.num_faults
        return {"error": error}


class InvalidRequest(ApiError):
    """A request that cannot be obeyed; `param` names the first fault, `faults` lists all."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"

    @classmethod
    def of(cls, faults: Sequence[Fault], count: int = 0) -> "InvalidRequest":
        """Returns an error that lists the first faults; `count` is the number of all."""
        first = [fault.shown for fault in faults[:MAX_FAULTS]]
        more = max(count, len(faults)) - len(first)
        message = "; ".join(fault.message for fault in first)
        error = cls(f"{message}; and {more} more" if more else message, first[0].param)
        error.faults = first
        error.num_faults = len(first) + more
        return error


def too_long(param: str, max_tokens: int, at_least: int) -> InvalidRequest:
    """Returns the error for a prompt whose tokens have not been counted to the end."""
    return InvalidRequest(
        f"This model's maximum context length is {max_tokens} tokens, but this request needs at "
        f"least {at_least} for its {param}.",
        param,
        "context_length_exceeded",
    )


GIVE_A_KEY = "Give a valid API key as 'Authorization: Bearer KEY' or as 'X-Api-Key: KEY'."


class Unauthenticated(ApiError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"

    def __init__(self, message: str = GIVE_A_KEY) -> None:
        super().__init__(message)

    @property
    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class Forbidden(ApiError):
    status = 403
    type = "permission_error"
    code = "forbidden"


class ModelNotFound(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"

    def __init__(self, name: str) -> None:
        shown = clip(name, MAX_PARAM)
        super().__init__(f"The model '{shown}' does not exist or you may not use it.", "model")


class BasePromptNotFound(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "base_prompt_not_found"

    def __init__(self, name: str) -> None:
        shown = clip(name, MAX_PARAM)
        super().__init__(
            f"There is no base prompt '{shown}'; GET /v1/base_prompts lists them.", "base_prompt"
        )


class NotFound(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(ApiError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeout(ApiError):
    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class Conflict(ApiError):
    status = 409
    type = "conflict_error"
    code = "already_exists"


class BodyTooLarge(ApiError):
    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class Unprocessable(ApiError):
    status = 422
    type = "invalid_request_error"
    code = "adapter_invalid"


class TooManyRequests(ApiError):
    """A caller or the server is at a limit; `retry_after` is in seconds."""

    status = 429
    type = "rate_limit_error"
    code = "too_many_requests"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self._retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        return {"retry-after": str(self._retry_after)}


class HeadTooLarge(ApiError):
    status = 431
    type = "invalid_request_error"
    code = "head_too_large"


class InternalError(ApiError):
    code = "internal_error"

    def __init__(self, message: str = "The server failed on this request.") -> None:
        super().__init__(message)


class TooManyConnections(ApiError):
    status = 503
    code = "too_many_connections"


class RequestQuarantined(ApiError):
    code = "request_quarantined"

    @property
    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "false"}  # which OpenAI's clients obey


class Unavailable(ApiError):
    status = 503
    code = "engine_unavailable"
    retry_after = 1.0  # seconds

    @classmethod
    def for_seconds(cls, seconds: float, message: str) -> "Unavailable":
        """Returns an error with the time in which an engine can be expected to be ready."""
        error = cls(message)
        error.retry_after = seconds
        return error

    @property
    def headers(self) -> dict[str, str]:
        return {"retry-after": str(max(1, math.ceil(self.retry_after)))}
