"""Times each native operation beside its naive twin, against what the machine can do.

    python benchmarks/ops/run.py [--only TEXT] [--threads N] [--seconds S] [--json FILE]

The machine's limits are measured first. A time is the least of many runs. `share` is the time that
the limits allow over the time taken: bytes at the read rate, or operations at the matmul rate,
whichever takes longer.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from cases import Case, cases

from loraplex.kernels.native.huge_pages import HugePages

sys.path.append(str(Path(__file__).parents[1]))
from machine import commit, describe, versions


@dataclass(frozen=True)
class Limits:
    read_gb_s: float
    matmul_gflop_s: float  # bfloat16

    def least_seconds(self, case: Case) -> float:
        return max(case.num_bytes / self.read_gb_s, case.flops / self.matmul_gflop_s) / 1e9


def best(run: Callable[[], object], seconds: float) -> float:
    """The least time of at least three runs, and of as many as fit into `seconds`."""
    run()
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < stop:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_limits(seconds: float) -> Limits:
    array = HugePages(2**28).empty(2**26, dtype=torch.float32)  # 256 MiB, beyond any cache
    array.fill_(1.0)
    square = torch.randn(1024, 1024).to(torch.bfloat16)
    return Limits(
        read_gb_s=array.nbytes / best(array.sum, seconds) / 1e9,
        matmul_gflop_s=2 * 1024**3 / best(lambda: square @ square, seconds) / 1e9,
    )


def measure(case: Case, limits: Limits, seconds: float) -> dict[str, object]:
    native = best(case.native, seconds) / case.times
    naive = best(case.naive, seconds / 4) / case.times
    return {
        "op": case.label,
        "us": round(native * 1e6, 1),
        "gb_s": round(case.num_bytes / native / 1e9, 1),
        "gflop_s": round(case.flops / native / 1e9),
        "share": round(limits.least_seconds(case) / native, 2),
        "naive_us": round(naive * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose label holds this text")
    parser.add_argument("--threads", type=int, help="default: torch's choice")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement")
    parser.add_argument("--json", type=Path, help="file for the results, with machine and versions")
    options = parser.parse_args()

    if options.threads:
        torch.set_num_threads(options.threads)
    limits = measure_limits(options.seconds)
    print(
        f"{torch.get_num_threads()} threads; read {limits.read_gb_s:.1f} GB/s, "
        f"bfloat16 matmul {limits.matmul_gflop_s:.0f} GFLOP/s"
    )
    print(f"{'':54}{'us':>10}{'GB/s':>8}{'GFLOP/s':>9}{'share':>7}{'naive us':>12}")
    rows = []
    for case in cases():
        if options.only in case.label:
            row = measure(case, limits, options.seconds)
            rows.append(row)
            print(
                f"{row['op']:54}{row['us']:>10}{row['gb_s']:>8}{row['gflop_s']:>9}"
                f"{row['share']:>7}{row['naive_us']:>12}"
            )
    if options.json:
        record = {
            "commit": commit(),
            "machine": describe(),
            "versions": versions(),
            "threads": torch.get_num_threads(),
            "limits": asdict(limits),
            "ops": rows,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
