"""Each error has one status, and says nothing of the server's inside."""

import pytest
from starlette.exceptions import HTTPException

from loraplex.engine.errors import EngineUnavailable, PromptRejected, RequestRejected
from loraplex.engine.protocol import FailureCode
from loraplex.platform.http.error_handlers import api_error_of

STATUS = {
    FailureCode.INVALID_REQUEST: (400, "invalid_value"),
    FailureCode.CONTEXT_LENGTH_EXCEEDED: (400, "context_length_exceeded"),
    FailureCode.BUDGET_EXCEEDED: (400, "budget_exceeded"),
    FailureCode.QUEUE_FULL: (503, "queue_full"),
    FailureCode.ADAPTER_NOT_FOUND: (404, "model_not_found"),
    FailureCode.BASE_PROMPT_NOT_FOUND: (404, "base_prompt_not_found"),
    FailureCode.ADAPTER_REJECTED: (422, "adapter_invalid"),
    FailureCode.ADAPTER_UNAVAILABLE: (503, "adapter_unavailable"),
    FailureCode.ENGINE_UNAVAILABLE: (503, "engine_unavailable"),
    FailureCode.REQUEST_QUARANTINED: (500, "request_quarantined"),
    FailureCode.INTERNAL: (500, "internal_error"),
}


@pytest.mark.parametrize("failure", FailureCode)
def test_every_failure_of_the_engine_has_a_status(failure: FailureCode) -> None:
    error = api_error_of(RequestRejected(failure, "why", "prompt"))

    assert (error.status, error.code) == STATUS[failure]
    assert error.message == "why"


def test_all_faults_of_an_adapter_are_passed_on() -> None:
    rejected = RequestRejected(FailureCode.ADAPTER_REJECTED, "two faults", None, ["a", "b"])

    body = api_error_of(rejected).to_body()

    assert body["error"]["faults"] == [
        {"param": None, "message": "a"},
        {"param": None, "message": "b"},
    ]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineUnavailable(), 503),
        (PromptRejected("no"), 400),
        (HTTPException(404), 404),
        (HTTPException(405), 405),
        (HTTPException(413, "big"), 413),
        (HTTPException(400, "odd"), 400),
    ],
)
def test_other_errors_have_theirs(error: Exception, status: int) -> None:
    assert api_error_of(error).status == status


def test_what_nobody_foresaw_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    error = api_error_of(RuntimeError("the secret is 7"))

    assert error.status == 500
    assert "secret" not in str(error.to_body())
    assert "the secret is 7" in caplog.text
