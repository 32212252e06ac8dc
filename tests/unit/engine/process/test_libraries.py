"""What an engine process imports, and what it leaves out."""

import os
import subprocess
import sys
from pathlib import Path

from support.models.architectures import ARCHITECTURES, write_checkpoint

from loraplex.engine.supervisor import ENGINE_COMMAND

IMPORT = (
    "import sys; from loraplex.engine.process.libraries import import_engine; import_engine(); "
)
SERVE_ALL = """
from pathlib import Path
from support.engine.engines import make_engine, request, run_one
for folder in sorted(Path("models").iterdir()):
    engine = make_engine(folder, Path("store"))
    run_one(engine, request([1, 2, 3], "r"))
    engine.close()
print([name for name in ("torch._dynamo.utils", "torch.distributed.tensor") if name in sys.modules])
"""


def run(program: str, folder: Path) -> str:
    """What a program prints in a process like that of the engines."""
    done = subprocess.run(
        [*ENGINE_COMMAND[:-2], "-c", program],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_no_model_needs_the_compiler_or_distributed_tensors(tmp_path: Path) -> None:
    for name in ARCHITECTURES:
        write_checkpoint(tmp_path / "models" / name, name)

    assert run(IMPORT + SERVE_ALL, tmp_path) == "[]"


def test_what_has_imported_the_engine_is_safe_to_fork(tmp_path: Path) -> None:
    program = "import os, torch; torch._C._cuda_getDeviceCount = None; " + IMPORT

    assert (
        run(program + "print(os.listdir('/proc/self/task') == [str(os.getpid())])", tmp_path)
        == "True"
    )


def test_who_asks_for_the_compiler_all_the_same_gets_it(tmp_path: Path) -> None:
    program = "import torch; compiled = torch.compile(lambda x: x + 1, backend='eager'); "

    assert run(IMPORT + program + "print(compiled(torch.tensor(1)).item())", tmp_path) == "2"
