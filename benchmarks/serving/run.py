"""Starts a server on a model and random adapters, runs the workloads, prints one JSON line each.

    python benchmarks/serving/run.py MODEL [--quick] [--cases TEXT] [--adapters FOLDER]
    python benchmarks/serving/run.py MODEL --vllm-python PYTHON      the same against vLLM for CPU

The first line says how long the start took and what memory it holds, the last one what memory it
holds in the end and, for Loraplex, how much KV memory was allocated and not used.
"""

import argparse
import json
import socket
import tempfile
from dataclasses import replace
from pathlib import Path

from load import Workload, measure
from make_adapters import make_adapters
from servers import KEY, VLLM, Loraplex, Setup, memory, running

ADAPTERS = 16
NAMES = tuple(f"a{index:03d}" for index in range(ADAPTERS))
NINE = ("base", *NAMES[:8])
ALL = ("base", *NAMES)
PREFIX = {"requests": 16, "shared": 1024, "unique": 32, "output": 16}

WARM_UP = Workload("warm-up", ALL, requests=len(ALL), concurrency=4, output=4, seed=99)
WORKLOADS = (
    Workload("base c1", ("base",), requests=4, concurrency=1, seed=1),
    Workload("base c8", ("base",), requests=24, seed=2),
    Workload("one adapter c8", NAMES[:1], requests=24, seed=3),
    Workload("base + 8 adapters c8", NINE, requests=27, seed=4),
    Workload("base + 16 adapters c16", ALL, requests=34, concurrency=16, seed=5),
    Workload("prefix-heavy base c8", ("base",), **PREFIX, seed=10),
    Workload("prefix-heavy base + 8 adapters c8", NINE, **PREFIX, seed=20),
)


def quick(workload: Workload) -> Workload:
    """Proves that everything runs; its numbers mean nothing."""
    models = len(workload.models)
    return replace(workload, requests=min(models, 4), shared=32, unique=5, output=4)


def sized_for(model: Path, workloads: list[Workload]) -> list[Workload]:
    """With prompts of token ids that the model has."""
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    return [replace(workload, vocab=min(workload.vocab, vocab)) for workload in workloads]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def say(**record: object) -> None:
    print(json.dumps(record), flush=True)


def benchmark(server: Loraplex | VLLM, setup: Setup, workloads: list[Workload], log: Path) -> None:
    with running(server, setup, log) as (process, seconds):
        say(label="ready", seconds=round(seconds, 1), **memory(process))
        for workload in workloads:
            say(**measure(workload, f"{setup.url}/v1", KEY))
        say(label="end", **memory(process), **server.own_numbers(setup.url))


def find_adapters(given: Path | None, model: Path, scratch: Path) -> dict[str, Path]:
    if given is None:
        return make_adapters(model, scratch, ADAPTERS)
    return {name: given / name for name in NAMES}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--adapters", type=Path, help="where a000, … are; made when not given")
    parser.add_argument("--cases", default="", help="only workloads whose label holds this text")
    parser.add_argument("--quick", action="store_true", help=quick.__doc__)
    parser.add_argument("--vllm-python", type=Path, help="measure vLLM of this interpreter instead")
    options = parser.parse_args()

    workloads = [WARM_UP, *(w for w in WORKLOADS if options.cases in w.label)]
    if options.quick:
        workloads = [quick(workload) for workload in workloads]
    workloads = sized_for(options.model, workloads)
    longest = max(workload.prompt + workload.output for workload in workloads)
    server = VLLM(options.vllm_python) if options.vllm_python else Loraplex()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        adapters = find_adapters(options.adapters, options.model, scratch)
        setup = Setup(options.model, adapters, free_port(), max_model_len=longest)
        benchmark(server, setup, workloads, scratch / "server.log")


if __name__ == "__main__":
    main()
