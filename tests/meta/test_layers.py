"""The arrow kernels <- adapters <- engine <- platform, and the console apart, as tests."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WINDOW = (  # what the platform may see of the layers that use torch
    "loraplex.adapters.manifest",
    "loraplex.engine.client",
    "loraplex.engine.config",
    "loraplex.engine.errors",
    "loraplex.engine.model_limits",
    "loraplex.engine.protocol",
    "loraplex.engine.request_seeds",
    "loraplex.engine.sampling_params",
    "loraplex.engine.supervisor",
    "loraplex.engine.text.message_content",
    "loraplex.engine.text.text_offsets",
    "loraplex.engine.text.tokenizer",
)
MAY_IMPORT = {
    "kernels": ("loraplex.kernels",),
    "adapters": ("loraplex.kernels", "loraplex.adapters"),
    "engine": ("loraplex.kernels", "loraplex.adapters", "loraplex.engine"),
    "platform": ("loraplex.platform", "loraplex.__version__", *WINDOW),
    "admin_ui": ("loraplex.admin_ui",),  # it talks to the platform over HTTP only
}
SOURCES = [path for layer in MAY_IMPORT for path in sorted((ROOT / layer).rglob("*.py"))]
TORCH_ALLOWED = ("kernels", "adapters", "engine")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("loraplex", *(part for part in parts if part != "__init__")))


def imports(path: Path) -> Iterator[str]:
    """Full dotted names; a relative import begins with a dot."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            yield from (f"{start}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def lies_in(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    own = [name for name in imports(path) if name.startswith(("loraplex", "."))]

    assert [name for name in own if not lies_in(name, MAY_IMPORT[layer])] == []


def test_a_kernel_needs_the_standard_library_torch_and_triton_only() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "triton", "loraplex"}
    foreign = {
        (name_of(path), name)
        for path in (ROOT / "kernels").rglob("*.py")
        for name in imports(path)
        if name.partition(".")[0] not in allowed
    }

    assert foreign == set()


def test_the_platform_and_its_window_load_without_torch() -> None:
    platform = (
        module_of(path)
        for path in SOURCES
        if path.relative_to(ROOT).parts[0] not in TORCH_ALLOWED and path.stem != "__main__"
    )
    script = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{name} brings torch")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, *WINDOW, *platform],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")


ORDER = (  # inside the engine; a room may import those before it, and the window
    {"step": 0, "text": 1, "sequence": 2, "kv": 3, "scheduling": 4, "commands": 5}
    | {"build": 6, "llm_engine": 7}
)
DEVICE_ORDER = {"step": 0, "kv": 1, "model": 2, "worker": 3, "build": 4}
TORCH_FREE = ("engine/text", "engine/kv", "engine/scheduling", "engine/commands", "engine/process")


def room_of(name: str) -> str:
    """The first part of a module's name inside the engine; empty outside."""
    parts = name.split(".")
    return parts[2] if parts[:2] == ["loraplex", "engine"] and len(parts) > 2 else ""


@pytest.mark.parametrize("path", sorted((ROOT / "engine").rglob("*.py")), ids=name_of)
def test_the_engines_rooms_import_in_one_order(path: Path) -> None:
    room = room_of(module_of(path))
    seen = {room_of(name) for name in imports(path)} - {room, ""}
    ordered = [order for order in (ORDER, DEVICE_ORDER) if room in order]
    allowed = {name for order in ordered for name in order if order[name] < order[room]}
    known = ORDER.keys() | DEVICE_ORDER.keys()

    assert not ordered or (seen & known) - allowed == set()


def test_rooms_that_need_no_device_load_without_torch() -> None:
    modules = [
        module_of(path) for folder in TORCH_FREE for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    script = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{name} brings torch")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, *modules], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
