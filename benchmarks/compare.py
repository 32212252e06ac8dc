"""Loraplex and its peers on the same workload, one after another on a quiet machine.

    python benchmarks/compare.py MODEL [--openvino-python PYTHON --openvino-models FOLDER]
        [--llama-server BINARY --llama-models FOLDER] [--vllm-python PYTHON] [--repeats 2]
    python benchmarks/compare.py MODEL --only loraplex --cases "base c1" "base c8"

PEFT is measured always, each other peer where its program is named (benchmarks/README.md says how
to set them up). Prints the table of speeds and the table of goals, and writes everything that was
measured into benchmarks/results/DATE-COMMIT.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import machine
import report
from contenders import contenders

HERE = Path(__file__).parent


def make_adapters(model: Path, out: Path) -> None:
    script = HERE / "serving" / "make_adapters.py"
    subprocess.run([sys.executable, script, model, out], stdout=subprocess.DEVNULL, check=True)


def measure_all(options: argparse.Namespace, adapters: Path) -> list[dict[str, Any]]:
    """Every contender in turn, then all over again, so that a slow hour hits them alike."""
    runs = []
    for repeat in range(options.repeats):
        for contender in contenders(options, adapters):
            busy = machine.wait_until_quiet(options.busy_limit, options.max_wait)
            print(f"run {repeat + 1} of {options.repeats}: {contender.name}", file=sys.stderr)
            neighbours = machine.Neighbours()
            run = {"contender": contender.name, "records": contender.measure()}
            runs.append(run | {"busy_before": busy, "foreign_cpu_s": neighbours.seconds()})
    return runs


def compare(options: argparse.Namespace) -> dict[str, Any]:
    machine.wait_until_quiet(options.busy_limit, options.max_wait)
    read_gb_s = machine.read_rate()
    with tempfile.TemporaryDirectory() as scratch:
        adapters = Path(scratch)
        make_adapters(options.model, adapters)
        peers = {one.name: one.version for one in contenders(options, adapters) if one.version}
        return {
            "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "commit": machine.commit(),
            "machine": machine.describe(),
            "versions": machine.versions() | peers,
            "repeats": options.repeats,
            "quick": options.quick,
            "read_gb_s": round(read_gb_s, 1),
            "roof_tok_s": round(read_gb_s * 1e9 / machine.weight_bytes(options.model), 1),
            "runs": measure_all(options, adapters),
        }


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--only", nargs="+", default=[], help="loraplex, peft, vllm, …")
    parser.add_argument("--cases", nargs="+", default=[""], help="whose label holds one of these")
    parser.add_argument("--openvino-python", type=Path)
    parser.add_argument("--openvino-models", type=Path, help="where the folders bf16 and int8 are")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--llama-models", type=Path, help="where model.gguf, a000.gguf, … are")
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--busy-limit", type=float, default=0.05, help="share of the processors")
    parser.add_argument("--max-wait", type=float, default=300, help="seconds to wait for quiet")
    parser.add_argument("--quick", action="store_true", help="prove that everything runs")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    return parser


def main() -> None:
    options = arguments().parse_args()
    result = compare(options)
    options.results.mkdir(parents=True, exist_ok=True)
    file = options.results / f"{result['date'][:10]}-{result['commit']}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(report.report(result))
    print(f"\nwritten: {file}", file=sys.stderr)


if __name__ == "__main__":
    main()
