"""Rules of kernels that the interpreter does not check."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "kernels").rglob("triton_kernels.py"))


def calls(path: Path, name: str) -> Iterator[ast.Call]:
    """Of a function of Triton's language."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="tl"), attr=attr)) if attr == name:
                yield node


def test_a_masked_load_says_what_it_gives_where_the_mask_is_off() -> None:
    """The interpreter gives 0, a GPU what was there."""
    loads = [(path, call) for path in FILES for call in calls(path, "load")]

    def keywords(call: ast.Call) -> set[str | None]:
        return {keyword.arg for keyword in call.keywords}

    silent = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path, call in loads
        if "mask" in keywords(call) and "other" not in keywords(call)
    ]
    assert loads != []
    assert silent == []
    assert all(len(call.args) == 1 for _, call in loads), "name the arguments of a load"


def test_no_kernel_adds_atomically() -> None:
    """The order of atomic additions, and so the last bit of a sum, differs from run to run."""
    names = ("atomic_add", "atomic_cas", "atomic_xchg")

    assert [path for path in FILES for name in names for _ in calls(path, name)] == []
