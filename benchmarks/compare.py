"""Loraplex, PEFT and vLLM for CPU on the same workload, one after another on a quiet machine.

    python benchmarks/compare.py MODEL [--vllm-python PYTHON] [--repeats 3]

PEFT is measured in process, with batches of eight. vLLM is measured where --vllm-python names the
interpreter of a virtual environment that has it (benchmarks/README.md). Prints a table and writes
everything that was measured into benchmarks/results/DATE-COMMIT.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import machine
import report

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Contender:
    """A script that prints one JSON record per line."""

    name: str
    command: tuple[str | Path, ...]

    def measure(self) -> list[dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, *self.command], stdout=subprocess.PIPE, text=True, check=True
        )
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def contenders(options: argparse.Namespace, adapters: Path) -> list[Contender]:
    model, serving = options.model, HERE / "serving" / "run.py"
    more = ("--quick",) if options.quick else ()
    served = (serving, model, "--adapters", adapters, *more)
    found = [
        Contender(report.OURS, served),
        Contender("PEFT", (HERE / "peers" / "peft_mixed.py", model, adapters, *more)),
    ]
    if options.vllm_python:
        found.append(Contender("vLLM", (*served, "--vllm-python", options.vllm_python)))
    return found


def make_adapters(model: Path, out: Path) -> None:
    script = HERE / "serving" / "make_adapters.py"
    subprocess.run([sys.executable, script, model, out], stdout=subprocess.DEVNULL, check=True)


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every contender in turn, then all over again, so that a slow hour hits them alike."""
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        make_adapters(options.model, Path(scratch))
        for repeat in range(options.repeats):
            for contender in contenders(options, Path(scratch)):
                busy = machine.wait_until_quiet(options.busy_limit, options.patience)
                print(f"run {repeat + 1} of {options.repeats}: {contender.name}", file=sys.stderr)
                neighbours = machine.Neighbours()
                run = {"contender": contender.name, "records": contender.measure()}
                runs.append(run | {"busy_before": busy, "foreign_cpu_s": neighbours.seconds()})
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--busy-limit", type=float, default=0.05, help="share of the processors")
    parser.add_argument("--patience", type=float, default=300, help="seconds to wait for quiet")
    parser.add_argument("--quick", action="store_true", help="prove that everything runs")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()

    now = datetime.now(UTC)
    result = {
        "date": f"{now:%Y-%m-%d %H:%M} UTC",
        "commit": machine.commit(),
        "machine": machine.describe(),
        "versions": machine.versions(options.vllm_python),
        "repeats": options.repeats,
        "quick": options.quick,
        "runs": measure_all(options),
    }
    options.results.mkdir(parents=True, exist_ok=True)
    file = options.results / f"{now:%Y-%m-%d}-{result['commit']}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(report.report(result))
    print(f"\nwritten: {file}", file=sys.stderr)


if __name__ == "__main__":
    main()
