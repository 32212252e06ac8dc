"""The application's OpenAPI schema, with keys, answers, streams and error statuses."""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from loraplex.platform.inference.answers.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
)

PROTECTED = "/v1/"
SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
REF = "#/components/schemas/Answer{name}"
ANSWERS = {  # path: the whole answer, and one event of a stream
    "/v1/chat/completions": (ChatCompletion, ChatCompletionChunk),
    "/v1/completions": (Completion, Completion),
}
ERRORS = {
    "400": "The request is invalid; the message names every fault",
    "401": "There is no valid key or token",
    "403": "The route needs the operator's key",
    "404": "There is no such model, adapter or base prompt",
    "408": "The body did not arrive in time",
    "409": "The name is taken",
    "413": "The body is too large",
    "422": "The adapter cannot be served",
    "429": "Too many choices are running or waiting; try again later",
    "500": "The server failed on this request",
    "503": "The engine is not ready, or has no room; try again later",
}
OF_BODIES = {"400", "408", "413", "500", "503"}
OF_PATHS = {
    "/v1/chat/completions": {"404", "429"},
    "/v1/completions": {"404", "429"},
    "/v1/models/{name}": {"404"},
    "/v1/load_lora_adapter": {"403", "409", "422"},
    "/v1/unload_lora_adapter": {"403", "404"},
    "/health": {"503"},
    "/ping": {"503"},
    "/metrics": {"401"},
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
                "faults": {"type": "array", "items": {"type": "object"}},
            },
        }
    },
}


def add_openapi(app: FastAPI) -> None:
    """Makes the application serve this schema."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _describe(app)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def _describe(app: FastAPI) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    kinds = [kind for pair in ANSWERS.values() for kind in pair]
    found, parts = msgspec.json.schema_components(kinds, ref_template=REF)
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    schemas |= {f"Answer{name}": part for name, part in parts.items()} | {"Error": ERROR}
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schema["components"]["securitySchemes"] = SECURITY
    answers = dict(zip(ANSWERS, zip(found[::2], found[1::2], strict=True), strict=True))
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            _complete(path, operation, answers.get(path))
    return schema


def _complete(
    path: str, operation: dict[str, Any], answer: tuple[dict[str, Any], dict[str, Any]] | None
) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    if path.startswith(PROTECTED):
        operation["security"] = [{name: []} for name in SECURITY]
    for status in sorted(_statuses(path, operation)):
        content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        responses[status] = {"description": ERRORS[status], "content": content}
    if answer is not None:
        whole, event = answer
        responses["200"]["content"] = {
            "application/json": {"schema": whole},
            "text/event-stream": {"schema": event},
        }


def _statuses(path: str, operation: dict[str, Any]) -> set[str]:
    """Returns the error statuses that an operation can answer with."""
    statuses = set(OF_PATHS.get(path, ()))
    if path.startswith(PROTECTED):
        statuses.add("401")
    return statuses | OF_BODIES if "requestBody" in operation else statuses
