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


def report(tmp_path: Path, runs: list[dict[str, Any]], **more: float) -> str:
    machine = {"cpu": "a processor", "cores": 2, "memory_gib": 24}
    result = {"commit": "abc", "date": "today", "repeats": 3, "machine": machine, "versions": {}}
    file = tmp_path / "result.json"
    file.write_text(json.dumps(result | more | {"runs": runs}))
    command = (sys.executable, REPORT, file)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_table_has_medians_and_ratios(tmp_path: Path) -> None:
    ours = [run_of("loraplex", ("base c8", speed, 0)) for speed in (90.0, 120.0, 100.0)]
    text = report(tmp_path, [*ours, run_of("PEFT", ("base c8", 50.0, 0))])

    assert "| base c8 | 100.0 | 50.0 | 2.00 |" in text


def test_a_run_with_errors_has_no_number(tmp_path: Path) -> None:
    runs = [run_of("loraplex", ("base c8", 90.0, 0)), run_of("vLLM", ("base c8", 500.0, 2))]

    assert "| base c8 | 90.0 | - | - |" in report(tmp_path, runs)


def test_a_goal_is_judged_against_the_fastest_peer(tmp_path: Path) -> None:
    speeds = {"loraplex": 50.0, "PEFT": 20.0, "OpenVINO": 41.0}
    text = report(tmp_path, [run_of(name, ("base c1", it, 0)) for name, it in speeds.items()])

    assert "| base c1 | 50.0 | OpenVINO 41.0 | 1.22 | ≥ 1.25 times | missed |" in text


def test_a_goal_against_a_peer_that_did_not_run_is_open(tmp_path: Path) -> None:
    text = report(tmp_path, [run_of("loraplex", ("one adapter c8", 50.0, 0))])

    assert "| one adapter c8 | 50.0 | OpenVINO | - | ≥ 1.4 times | not measured |" in text


def test_memory_is_judged_without_the_kv_pool(tmp_path: Path) -> None:
    end = {"label": "end", "pss_mb": 3000, "kv_resident_mb": 1000}
    runs = [{"contender": "loraplex", "records": [end]}]

    assert "| memory of all processes, KV pool apart | 2000.0 |  | - | ≤ 2560 MiB | met |" in (
        report(tmp_path, runs)
    )


def test_decoding_is_judged_against_what_the_memory_allows(tmp_path: Path) -> None:
    record = {"label": "base c1", "output_tok_s": 45.0, "itl_mean_ms": 20.0, "errors": 0}
    runs = [{"contender": "loraplex", "records": [record]}]

    text = report(tmp_path, runs, roof_tok_s=62.5)

    assert "| base c1, decode alone | 50.0 | memory roof 62.5 | 0.80 | ≥ 0.8 times | met |" in text


def test_the_first_token_through_an_adapter_is_compared_with_the_bases(tmp_path: Path) -> None:
    def run(contender: str, base: float, adapter: float) -> dict[str, Any]:
        times = {"first token base": base, "first token adapter": adapter}
        records = [{"label": label, "ttft_p50_ms": ms} for label, ms in times.items()]
        return {"contender": contender, "records": records}

    text = report(tmp_path, [run("loraplex", 900.0, 990.0), run("vLLM", 1000.0, 5800.0)])

    assert "| 1.10 | vLLM 5.80 | 1.10 | ≤ 1.15 times | met |" in text
