"""The engine's libraries, imported without the parts of them that no engine uses.

Importing transformers' models also imports torch's compiler, its distributed tensors and, for
these, sympy: more than half of the processor time and a third of the memory of all imports.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
REIMPORTED = ("loraplex", "transformers")  # what may have been imported in part

logger = logging.getLogger(__name__)


def import_engine(module: str = "loraplex.engine.llm_engine") -> None:
    """Imports the engine, and whatever is needed to load any model and to compute with it.

    Where a version of a library needs the parts that are left out, all is imported.

    Raises:
        ImportError: if a library is missing or broken.
    """
    before = set(sys.modules)
    try:
        with _without_compiler(), _without_distributed():
            import_module(module)
    except (ImportError, AttributeError) as error:
        logger.warning("All of the libraries is imported, which takes longer: %s", error)
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in REIMPORTED:
                del sys.modules[name]
        import_module(module)


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Puts in the compiler's place a module whose decorators do nothing; its own modules that do
    without the compiler can still be imported."""
    if COMPILER in sys.modules:
        yield
        return
    import torch  # noqa: PLC0415 - seconds

    stand_in = ModuleType(COMPILER)
    stand_in.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]
    for decorator in ("allow_in_graph", "assume_constant_result", "disable"):
        setattr(stand_in, decorator, _undecorated)
    sys.modules[COMPILER] = stand_in
    vars(torch)["_dynamo"] = stand_in
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.startswith(COMPILER)]:
            del sys.modules[name]
        vars(torch).pop("_dynamo", None)


@contextmanager
def _without_distributed() -> Iterator[None]:
    """Tells transformers what it is told by a build of torch for a single process."""
    utils = import_module("transformers.utils")
    import_utils = import_module("transformers.utils.import_utils")
    is_available = import_utils.is_torch_distributed_available
    for module in (utils, import_utils):
        vars(module)["is_torch_distributed_available"] = lambda: False
    try:
        yield
    finally:
        for module in (utils, import_utils):
            vars(module)["is_torch_distributed_available"] = is_available


def _undecorated(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
    return function if function is not None else _undecorated
