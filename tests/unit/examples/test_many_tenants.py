"""The example of a program with many tenants, run as a reader would."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "examples" / "many_tenants.py"


@pytest.mark.slow
def test_three_tenants_share_the_prompt_and_have_their_shares(demo_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, demo_model], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert re.findall(r"(\d+) of them shared", done.stdout) == ["154"] * 3
    assert '{"name": "Mara Lind"' in done.stdout
    assert re.search(r"^ north +600 +None +3\.0 ", done.stdout, re.MULTILINE)
