"""The engine's libraries, imported without the parts of them that no engine uses.

Importing transformers' models also imports torch's compiler and its distributed tensors: nearly
half of the processor time of all imports.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"


def import_engine() -> None:
    """Imports the engine, and whatever it needs to load a model and to compute with it.

    Raises:
        ImportError: if a library is missing or broken.
    """
    _stand_in_for_compiler()
    with _without_distributed():
        import_module("loraplex.engine.llm_engine")
    import_module(
        "torch.fx.experimental.symbolic_shapes"
    )  # else the first tensor without data does


class CompilerStandIn(ModuleType):
    """Takes the place of torch's compiler, which torch itself imports at the first weight that is
    initialised. Its decorators do nothing; whatever else is asked of it, the compiler answers."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the compiler's, of which modules that do without it can be imported."""
        super().__init__(COMPILER)
        self.__path__ = [str(folder)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks what kind of module this is
            raise AttributeError(name)
        if sys.modules.get(COMPILER) is self:
            for loaded in [it for it in sys.modules if it.startswith(COMPILER)]:
                del sys.modules[loaded]
        return getattr(import_module(COMPILER), name)

    @staticmethod
    def disable(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
        """Returns what it decorates, called with arguments or without."""
        return CompilerStandIn.disable if function is None else function

    allow_in_graph = assume_constant_result = disable


def _stand_in_for_compiler() -> None:
    if COMPILER not in sys.modules:
        torch = import_module("torch")
        stand_in = CompilerStandIn(Path(str(torch.__file__)).parent / "_dynamo")
        sys.modules[COMPILER] = stand_in
        vars(torch)["_dynamo"] = stand_in


@contextmanager
def _without_distributed() -> Iterator[None]:
    """Tells transformers what it is told by a build of torch for a single process."""
    places = [import_module(f"transformers.utils{it}") for it in ("", ".import_utils")]
    is_available = vars(places[0])["is_torch_distributed_available"]
    for place in places:
        vars(place)["is_torch_distributed_available"] = lambda: False
    try:
        yield
    finally:
        for place in places:
            vars(place)["is_torch_distributed_available"] = is_available
