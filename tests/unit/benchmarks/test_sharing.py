"""Each sharing benchmark runs from its command line to its record."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from support.models.architectures import write_checkpoint

FOLDER = Path(__file__).parents[3] / "benchmarks" / "sharing"
COMMANDS = [file for file in sorted(FOLDER.glob("*.py")) if "def main(" in file.read_text()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@pytest.mark.parametrize("file", COMMANDS, ids=lambda file: file.stem)
def test_it_runs_and_keeps_its_record(
    file: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = tmp_path / "record.json"
    monkeypatch.syspath_prepend(file.parent)
    command = [file.name, str(model), "--quick", "--threads", "1", "--save", str(record)]
    monkeypatch.setattr(sys, "argv", command)

    runpy.run_path(str(file), run_name="__main__")

    assert json.loads(record.read_text())["benchmark"] == file.stem
    assert "| ---" in capsys.readouterr().out
