"""House rules that a linter does not know."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAYERS = ("kernels", "adapters", "engine", "platform", "admin_ui")
READS_INPUT = ("adapters", "platform")  # files and bodies that a tenant sends
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}
# Written so that this file does not name one itself.
MACHINE_PATHS = re.compile(r"[/]work/|[/]root/|[/]tmp/\w|[.][.]/shared|[/]home/\w+/")


def trees(*layers: str) -> Iterator[tuple[str, ast.Module]]:
    for layer in layers:
        for path in sorted((ROOT / layer).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def texts_of_the_repository() -> Iterator[tuple[str, str]]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    for name in sorted(filter(None, names.decode().split("\0"))):
        path = ROOT / name
        if path.is_file() and b"\0" not in (data := path.read_bytes()):
            yield name, data.decode(errors="replace")


def mentions_the_environment(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="os"), attr=attr):
            return attr in ENVIRONMENT
        case ast.ImportFrom(module="os", names=names):
            return any(alias.name in ENVIRONMENT for alias in names)
    return False


def test_only_the_platforms_config_reads_the_environment() -> None:
    readers = {
        name
        for name, tree in trees(*LAYERS)
        if any(mentions_the_environment(node) for node in ast.walk(tree))
    }

    assert readers <= {"platform/config.py"}


def test_nothing_that_reads_input_relies_on_assert() -> None:
    asserting = {
        f"{name}:{node.lineno}"
        for name, tree in trees(*READS_INPUT)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    }

    assert asserting == set()


def test_no_file_names_a_path_of_one_machine() -> None:
    found = {
        f"{name}: {match.group()}"
        for name, text in texts_of_the_repository()
        if (match := MACHINE_PATHS.search(text))
    }

    assert found == set()
