"""What can go wrong at the engine's door. Torch-free.

    EngineError
    ├── StartRefused           the engine cannot start as configured; a restart would not help
    │   ├── ConfigRefused      a setting does not fit the model or the machine; shows the arithmetic
    │   └── UnsupportedModel   the folder holds no checkpoint that this engine can serve
    ├── RequestRejected        one request or registration cannot be done; the engine goes on
    ├── PromptRejected         messages that the chat template cannot render
    │   └── PromptTooLong      a text that can never fit, which was not tokenised to its end
    └── EngineUnavailable      the engine is starting, restarting or gone

Messages of `RequestRejected` and `PromptRejected` reach a tenant: no path, no trace.
"""

from loraplex.engine.protocol import FailureCode, RequestFailed

INTERNAL_ERROR = "The engine failed on this request."  # whose reason is in the log


class EngineError(Exception):
    """The root of the tree."""

    def __init__(self, message: str) -> None:
        self.message = message
        super().__init__(message)


class StartRefused(EngineError):
    pass


class ConfigRefused(StartRefused):
    pass


class UnsupportedModel(StartRefused):
    pass


class RequestRejected(EngineError):
    """Raised for one request or registration. `param` is the field at fault, `faults` lists all
    faults where there are several."""

    def __init__(
        self,
        code: FailureCode,
        message: str,
        param: str | None = None,
        faults: list[str] | None = None,
    ) -> None:
        self.code = code
        self.param = param
        self.faults = faults or []
        super().__init__(message)

    def to_event(self, request_id: str) -> RequestFailed:
        return RequestFailed(
            request_id=request_id,
            code=self.code,
            message=self.message,
            param=self.param,
            faults=self.faults,
        )


class PromptRejected(EngineError):
    pass


class PromptTooLong(PromptRejected):
    """Raised for a text that can never fit. `at_least`: tokens that the text certainly has."""

    def __init__(self, max_tokens: int, at_least: int) -> None:
        self.max_tokens = max_tokens
        self.at_least = at_least
        super().__init__(f"The text has at least {at_least} tokens, of which {max_tokens} fit.")


class EngineUnavailable(EngineError):
    """Raised while no engine can serve. `retry_after`: seconds until one can be expected."""

    def __init__(
        self,
        message: str = "The engine is not available; try again shortly.",
        retry_after: float = 1.0,
    ) -> None:
        self.retry_after = retry_after
        super().__init__(message)


def error_of(event: RequestFailed) -> EngineError:
    """Returns the exception that a client raises for a failure sent by the engine."""
    if event.code is FailureCode.ENGINE_UNAVAILABLE:
        return EngineUnavailable(event.message)
    return RequestRejected(event.code, event.message, event.param, event.faults)
