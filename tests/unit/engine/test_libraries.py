"""What an engine process imports, and what it leaves out."""

import subprocess
from pathlib import Path

from loraplex.engine.supervisor import ENGINE_COMMAND

UNUSED = ["sympy", "torch._dynamo", "torch.distributed.tensor"]


def run(program: str, folder: Path) -> str:
    """What a program prints in a process like that of the engines."""
    command = [*ENGINE_COMMAND[:-2], "-c", program]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_engine_is_imported_without_the_compiler_and_without_sympy(tmp_path: Path) -> None:
    program = (
        "import sys; from loraplex.engine.libraries import import_engine; import_engine(); "
        f"print([name for name in {UNUSED} if name in sys.modules])"
    )

    assert run(program, tmp_path) == "[]"


def test_what_has_imported_the_engine_can_be_forked(tmp_path: Path) -> None:
    program = (
        "import os, torch; from loraplex.engine.libraries import import_engine; "
        "torch._C._cuda_getDeviceCount = None; import_engine(); "
        "print(len(os.listdir('/proc/self/task')))"
    )

    assert run(program, tmp_path) == "1"


def test_a_library_that_needs_the_compiler_gets_it(tmp_path: Path) -> None:
    (tmp_path / "needy.py").write_text("import torch._dynamo\noptimize = torch._dynamo.optimize\n")
    program = (
        "import sys; sys.path.append('.'); from loraplex.engine.libraries import import_engine; "
        "import_engine('needy'); import needy; print(needy.optimize.__module__)"
    )

    assert run(program, tmp_path).startswith("torch._dynamo")
