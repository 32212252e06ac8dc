"""Preparing the demo model's folder, short of the conversion itself."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "examples" / "prepare_model.py"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def prepare(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, folder]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_complete_folder_is_left_as_it_is(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).write_text(name)

    done = prepare(tmp_path)

    assert (done.returncode, done.stdout) == (0, f"{tmp_path}\n")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {n: n for n in FILES}


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")

    done = prepare(tmp_path)

    assert done.returncode == 1
    assert "no complete model folder" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
