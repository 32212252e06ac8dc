"""The demo model for tests that need a real one; a plugin that makes it a fixture everywhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PREPARE = Path(__file__).parents[3] / "examples" / "prepare_model.py"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of Gemma 3 270M, made on first use (a minute) and kept for other runs."""
    home = Path(os.environ.get("LORAPLEX_HOME") or "~/.loraplex").expanduser()
    folder = home / "models" / "gemma-3-270m"
    done = subprocess.run(
        [sys.executable, PREPARE, folder], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.fail(f"the demo model cannot be made:\n{done.stdout}{done.stderr}")
    return folder
