"""What a user can set, call or meet is in docs/, and docs/ names nothing else."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from fastapi.routing import APIRoute
from typer.main import get_command

from loraplex.engine.protocol import EngineStats, FailureCode
from loraplex.platform.catalog import endpoints as adapters
from loraplex.platform.cli import app
from loraplex.platform.config import PREFIX, Settings
from loraplex.platform.engines.failover import FailoverStats
from loraplex.platform.errors import ApiError
from loraplex.platform.http import operations
from loraplex.platform.inference import endpoints as inference
from loraplex.platform.inference.bodies.schemas import ChatCompletionRequest, CompletionRequest
from loraplex.platform.observability.metrics import Metrics

DOCS = Path(__file__).parents[2] / "docs"
LAYERS = ("kernels", "adapters", "engine", "platform")
API = (DOCS / "api.md").read_text()
OPERATIONS = (DOCS / "operations.md").read_text()


def commands() -> dict[str, typer.core.TyperCommand]:
    group = get_command(app)
    return group.commands  # type: ignore[attr-defined, no-any-return]


def options() -> set[str]:
    names = {name for c in commands().values() for p in c.params for name in p.opts}
    return {name for name in names if name.startswith("--")}


def settings() -> set[str]:
    return {PREFIX + name.upper() for name in Settings.model_fields}


def metrics() -> set[str]:
    text = Metrics("base", FailoverStats()).render(EngineStats()).decode()
    return set(re.findall(r"^# TYPE (\S+?) \w+$", text, re.MULTILINE))


def routes() -> set[str]:
    found = [*inference.router.routes, *operations.router.routes, *adapters.router.routes]
    return {route.path.replace(":path", "") for route in found if isinstance(route, APIRoute)}


def error_codes(kind: type[ApiError] = ApiError) -> Iterator[str]:
    if kind.code is not None:
        yield kind.code
    for child in kind.__subclasses__():
        yield from error_codes(child)


def named(text: str, pattern: str) -> set[str]:
    return set(re.findall(pattern, text))


def whole(name: str) -> str:
    return rf"(?<![\w-]){re.escape(name)}(?![\w-])"


@pytest.mark.parametrize(
    ("real", "text"),
    [
        (options(), OPERATIONS),
        (settings(), OPERATIONS),
        ({f"loraplex {name}" for name in commands()}, OPERATIONS),
        (metrics(), OPERATIONS),
        (routes(), API),
        ({*FailureCode}, API),
        ({*error_codes()}, API),
        ({*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}, API),
    ],
    ids=["options", "settings", "commands", "metrics", "routes", "failures", "errors", "fields"],
)
def test_it_is_in_the_docs(real: set[str], text: str) -> None:
    code = " ".join(named(text, "`([^`\n]+)`"))

    assert {name for name in real if not named(code, whole(name))} == set()


@pytest.mark.parametrize(
    ("pattern", "real"),
    [
        (r"(?<![\w-])--[a-z][a-z-]+", options() | {"--help"}),
        (rf"{PREFIX}[A-Z_]*[A-Z]", settings()),
        (r"(?:vllm|loraplex):\w+", metrics()),
    ],
    ids=["options", "settings", "metrics"],
)
def test_the_docs_name_nothing_else(pattern: str, real: set[str]) -> None:
    assert named(API + OPERATIONS, pattern) - real == set()


def test_every_file_that_the_architecture_names_exists() -> None:
    text = (DOCS / "architecture.md").read_text()
    files = {path.name for layer in LAYERS for path in (DOCS.parent / layer).rglob("*.py")}
    files |= {path.name for path in (DOCS.parent / "tests" / "meta").iterdir()}

    assert {Path(name).name for name in named(text, r"[\w/]+\.py")} - files == set()
