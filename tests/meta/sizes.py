"""Prints what has grown beyond the house's guides; it fails nothing. Run by `make lint`."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAYERS = ("kernels", "adapters", "engine", "platform", "admin_ui", "tests/support")
FILES, METHODS, IMPORTS = 15, 16, 15  # of a folder, a class, and of ours in a module


def large_folders(sources: list[Path]) -> Iterator[str]:
    folders = sorted({path.parent for path in sources})
    for folder in folders:
        count = sum(path.parent == folder and path.stem != "__init__" for path in sources)
        if count > FILES:
            yield f"{folder.relative_to(ROOT)}/ has {count} source files"


def large_classes(path: Path, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            count = sum(isinstance(it, ast.FunctionDef | ast.AsyncFunctionDef) for it in node.body)
            if count > METHODS:
                yield f"{path.relative_to(ROOT)}: {node.name} has {count} methods"


def many_imports(path: Path, tree: ast.Module) -> Iterator[str]:
    ours = {
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("loraplex.")
    }
    if len(ours) > IMPORTS and "build" not in path.parts:
        yield f"{path.relative_to(ROOT)} imports {len(ours)} of our modules"


def main() -> None:
    sources = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]
    found = list(large_folders(sources))
    for path in sources:
        tree = ast.parse(path.read_text())
        found += [*large_classes(path, tree), *many_imports(path, tree)]
    for line in found:
        sys.stdout.write(f"guide: {line}\n")


if __name__ == "__main__":
    main()
