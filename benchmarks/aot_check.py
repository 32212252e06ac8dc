"""Compiles every Triton launch of known models for GPUs that are not here, and checks the result.

    python benchmarks/aot_check.py [--models NAME...] [--dtypes NAME...] [--chips NAME...]
                                   [--steps ROWS...] [--kernels TEXT] [--max-spill BYTES]
                                   [--jobs N] [--save]

The engine's own launch wrappers run on tensors without data; what they would launch is compiled by
Triton and assembled by the tools in its wheel. Exits with 1 where something does not compile, keeps
more than a few registers in memory, or takes more shared memory than a block may have. --save
writes benchmarks/results/aot-<date>.json with every binary, and a table beside it.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product, repeat
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent))
from aot.binary import CHIPS, Binary, Chip, inspect
from aot.launches import Launch, caught_launches
from aot.models import MODELS, STEPS, run_step
from aot.report import table
from machine import commit, versions

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_TOLD = 50  # binaries between two signs of life
_MOST_SPILT = 16  # bytes of a thread
_MOST_SPILT_PADDED = 40  # in attention whose heads are padded to a power of two, such as 96
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Job:
    """One launch for one chip; `model` is the first one that asks for it."""

    chip: Chip
    model: str
    launch: Launch


@dataclass(frozen=True)
class Outcome:
    chip: str
    kernel: str
    numbers: str  # the narrowest format of the tensors
    model: str
    choices: dict[str, str]
    binary: Binary | None  # None: it did not compile
    faults: tuple[str, ...]


def find_jobs(chip: Chip, options: argparse.Namespace) -> Iterator[Job]:
    """Every different launch of the models' steps."""
    found = 0
    models = [model for model in MODELS if model.name in options.models]
    steps = [step for step in STEPS if step.name in options.steps]
    with caught_launches(chip.target) as launches:
        for model, dtype, step in product(models, options.dtypes, steps):
            run_step(model, step, DTYPES[dtype])
            new, found = launches[found:], len(launches)
            yield from (Job(chip, model.name, one) for one in new if options.kernels in one.name)


def check(job: Job, max_spill: int) -> Outcome:
    binary, faults = None, []
    try:
        binary = inspect(job.launch.compile(job.chip.target), job.chip)
    except (triton.TritonError, RuntimeError) as error:
        faults.append(f"does not compile: {error}")
    if _is_padded(job.launch):
        max_spill = max(max_spill, _MOST_SPILT_PADDED)
    if binary and binary.spill_bytes > max_spill:
        faults.append(f"spills {binary.spill_bytes} bytes")
    if binary and binary.shared_bytes > job.chip.shared_bytes:
        faults.append(f"takes {binary.shared_bytes} of {job.chip.shared_bytes} bytes")
    choices = {name: str(value) for name, value in job.launch.choices.items()}
    return Outcome(
        chip=job.chip.name,
        kernel=job.launch.name,
        numbers=job.launch.numbers,
        model=job.model,
        choices={**choices, **{name: str(v) for name, v in job.launch.options.items()}},
        binary=binary,
        faults=tuple(faults),
    )


def _is_padded(launch: Launch) -> bool:
    """Whether attention's heads are narrower than the tiles that hold them."""
    width = int(launch.choices.get("KEY_DIM", 1))
    return width & (width - 1) != 0


def check_all(jobs: list[Job], options: argparse.Namespace) -> list[Outcome]:
    """In forked processes, which find the jobs in their memory: kernels cannot be sent."""
    _jobs[:] = jobs
    context = multiprocessing.get_context("fork")
    outcomes: list[Outcome] = []
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        for outcome in pool.map(_check_at, range(len(jobs)), repeat(options.max_spill)):
            outcomes.append(outcome)
            if len(outcomes) % _TOLD == 0:
                print(f"{len(outcomes)} done", flush=True)
    return outcomes


_jobs: list[Job] = []


def _check_at(index: int, max_spill: int) -> Outcome:
    return check(_jobs[index], max_spill)


def save(outcomes: list[Outcome], summary: str) -> None:
    path = RESULTS / f"aot-{time.strftime('%Y-%m-%d')}.json"
    document = {
        "commit": commit(),
        "versions": versions(),
        "binaries": [asdict(outcome) for outcome in outcomes],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    path.with_suffix(".md").write_text(summary)
    print(f"written: {path} and the table beside it")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [model.name for model in MODELS]
    chips = [chip.name for chip in CHIPS]
    parser.add_argument("--models", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--dtypes", nargs="+", default=[*DTYPES], choices=[*DTYPES])
    parser.add_argument("--chips", nargs="+", default=chips, choices=chips)
    steps = [step.name for step in STEPS]
    parser.add_argument("--steps", nargs="+", default=steps, choices=steps, metavar="ROWS")
    parser.add_argument("--kernels", default="", help="a part of their names", metavar="TEXT")
    parser.add_argument(
        "--max-spill", type=int, default=_MOST_SPILT, help="bytes of a thread", metavar="N"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--save", action="store_true", help="write the result files")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    jobs = [job for chip in CHIPS if chip.name in options.chips for job in find_jobs(chip, options)]
    print(f"compiling {len(jobs)} binaries with Triton {triton.__version__}", flush=True)
    outcomes = check_all(jobs, options)
    summary = table(outcomes)
    print(summary)
    faulty = [outcome for outcome in outcomes if outcome.faults]
    for outcome in faulty:
        print(f"{outcome.chip} {outcome.kernel} {outcome.numbers} of {outcome.model}:")
        print(f"  {'; '.join(outcome.faults)}\n  {outcome.choices}")
    print(f"{len(outcomes)} binaries, {len(faulty)} with faults")
    if options.save:
        save(outcomes, summary)
    return 1 if faulty or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
