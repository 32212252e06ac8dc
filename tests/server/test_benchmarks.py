"""The benchmark of docs/benchmarks.md runs, from the adapters to the last number."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.server

RUN = Path(__file__).parents[2] / "benchmarks" / "serving" / "run.py"


def test_every_workload_is_served_without_an_error(model_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, RUN, model_folder, "--quick"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    first, *workloads, last = map(json.loads, done.stdout.splitlines())
    assert [
        (record["label"], record["first_error"]) for record in workloads if record["errors"]
    ] == []
    assert len(workloads) == 10
    assert first["seconds"] > 0
    assert last["kv_resident_mb"] < last["pss_mb"]
    assert 0 <= last["waste_mean"] <= last["waste_peak"] < 1
