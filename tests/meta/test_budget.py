"""Sizes that a reader can take in. Raising one is a change that someone reads."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAYERS = ("kernels", "adapters", "engine", "platform", "admin_ui")
SOURCE_LINES, TEST_LINES = 400, 500
FUNCTION_LINES, KERNEL_LINES = 50, 100


def files(*folders: str) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()


def functions(text: str) -> Iterator[tuple[str, int]]:
    """Name and length of each."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def test_no_file_is_too_long_to_read() -> None:
    sizes = [(*file, SOURCE_LINES) for file in files(*LAYERS, "benchmarks", "examples")]
    sizes += [(*file, TEST_LINES) for file in files("tests")]

    assert [name for name, text, limit in sizes if text.count("\n") > limit] == []


def test_no_function_is_too_long_to_see_whole() -> None:
    too_long = [
        f"{file}: {name} has {length} lines"
        for file, text in files(*LAYERS)
        for name, length in functions(text)
        if length > (KERNEL_LINES if file.startswith("kernels/") else FUNCTION_LINES)
    ]

    assert too_long == []
