"""The schema says what clients made from it need."""

from typing import Any

import pytest
from fastapi import FastAPI

from loraplex.platform.catalog import endpoints as adapters
from loraplex.platform.http import operations
from loraplex.platform.http.openapi import add_openapi
from loraplex.platform.inference import endpoints as inference

OPERATIONS = {
    "/health": {"200", "503"},
    "/ping": {"200", "503"},
    "/load": {"200"},
    "/metrics": {"200", "401"},
    "/version": {"200"},
}
INFERENCE = ("/v1/chat/completions", "/v1/completions")


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    app = FastAPI(title="Loraplex", version="1")
    for router in (inference.router, adapters.router, operations.router):
        app.include_router(router)
    add_openapi(app)
    return app.openapi()


def operations_of(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method} {path}": operation
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    }


def test_all_of_v1_and_nothing_else_needs_a_key(schema: dict[str, Any]) -> None:
    protected = {name for name, it in operations_of(schema).items() if it.get("security")}

    assert protected == {name for name in operations_of(schema) if " /v1/" in name}
    assert schema["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"


@pytest.mark.parametrize("path", INFERENCE)
def test_answers_are_objects_or_events(schema: dict[str, Any], path: str) -> None:
    content = schema["paths"][path]["post"]["responses"]["200"]["content"]

    assert content.keys() == {"application/json", "text/event-stream"}
    for kind in content.values():
        part = schema["components"]["schemas"][kind["schema"]["$ref"].rpartition("/")[2]]
        assert {"id", "choices", "usage"} <= part["properties"].keys()


@pytest.mark.parametrize("path", INFERENCE)
def test_the_statuses_are_those_that_come(schema: dict[str, Any], path: str) -> None:
    statuses = set(schema["paths"][path]["post"]["responses"])

    assert statuses == {"200", "400", "401", "404", "408", "413", "429", "500", "503"}


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("/v1/load_lora_adapter", {"403", "409", "422"}),
        ("/v1/unload_lora_adapter", {"403", "404"}),
    ],
)
def test_each_route_of_adapters_has_statuses_of_its_own(
    schema: dict[str, Any], path: str, own: set[str]
) -> None:
    statuses = set(schema["paths"][path]["post"]["responses"])

    assert statuses == {"200", "400", "401", "408", "413", "500", "503"} | own


def test_the_operators_statuses_are_those_that_come(schema: dict[str, Any]) -> None:
    statuses = {path: set(schema["paths"][path]["get"]["responses"]) for path in OPERATIONS}

    assert statuses == OPERATIONS


def test_no_answer_of_json_is_without_a_schema(schema: dict[str, Any]) -> None:
    lists = schema["paths"]["/v1/models"]["get"]["responses"]["200"]["content"]

    assert lists["application/json"]["schema"]["$ref"].endswith("ModelList")
    assert "properties" in schema["components"]["schemas"]["ModelCard"]


def test_every_reference_leads_somewhere(schema: dict[str, Any]) -> None:
    names = {f"#/components/schemas/{name}" for name in schema["components"]["schemas"]}

    assert references(schema) <= names


def references(value: object) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(references(part) for part in value.values()))
    if isinstance(value, list):
        return set().union(*(references(part) for part in value))
    return set()
