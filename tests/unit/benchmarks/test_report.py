"""A comparison's table, made from its records."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

REPORT = Path(__file__).parents[3] / "benchmarks" / "report.py"


def run_of(contender: str, *speeds: tuple[str, float, int]) -> dict[str, Any]:
    records = [{"label": x, "output_tok_s": speed, "errors": n} for x, speed, n in speeds]
    return {"contender": contender, "records": records}


def report(tmp_path: Path, runs: list[dict[str, Any]]) -> str:
    machine = {"cpu": "a processor", "cores": 2, "memory_gib": 24}
    result = {"commit": "abc", "date": "today", "repeats": 3, "machine": machine, "versions": {}}
    file = tmp_path / "result.json"
    file.write_text(json.dumps(result | {"runs": runs}))
    command = (sys.executable, REPORT, file)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_table_has_medians_and_ratios(tmp_path: Path) -> None:
    ours = [run_of("loraplex", ("base c8", speed, 0)) for speed in (90.0, 120.0, 100.0)]
    text = report(tmp_path, [*ours, run_of("PEFT", ("base c8", 50.0, 0))])

    assert "| base c8 | 100.0 | 50.0 | 2.00 |" in text


def test_a_run_with_errors_has_no_number(tmp_path: Path) -> None:
    runs = [run_of("loraplex", ("base c8", 90.0, 0)), run_of("vLLM", ("base c8", 500.0, 2))]

    assert "| base c8 | 90.0 | - | - |" in report(tmp_path, runs)
