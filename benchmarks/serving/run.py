"""Starts a server on a model and random adapters, runs the workloads, prints one JSON line each.

    python benchmarks/serving/run.py MODEL [--quick] [--cases TEXT …] [--quantization int8]
    python benchmarks/serving/run.py MODEL --vllm-python PYTHON      the same against vLLM for CPU
    python benchmarks/serving/run.py MODEL --llama-server BINARY --llama-models FOLDER

The first line says how long the start took and what memory it holds, the last one what memory it
holds in the end and how much of that is KV memory. `cpu_s` is the processor time of a workload, one
number for each process of the server.
"""

import argparse
import json
import socket
import tempfile
from pathlib import Path

from load import Workload, measure
from make_adapters import make_adapters
from process import memory, processor_seconds, running
from servers import KEY, VLLM, LlamaServer, Loraplex, Server, Setup
from workloads import ADAPTERS, NAMES, choose, quick, sized_for


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def say(mark: str, label: str, **record: object) -> None:
    print(json.dumps({"label": mark + label} | record), flush=True)


def benchmark(
    server: Server, setup: Setup, workloads: list[Workload], log: Path, mark: str
) -> None:
    with running(server, setup, log) as (process, seconds):
        say(mark, "ready", seconds=round(seconds, 1), **memory(process))
        for workload in workloads:
            before = processor_seconds(process)
            record = measure(workload, f"{setup.url}/v1", KEY, server.body)
            used = zip(processor_seconds(process), before, strict=False)
            say(mark, **record, cpu_s=[round(end - start, 2) for end, start in used])
        say(mark, "end", **memory(process), **server.own_numbers(setup))


def find_adapters(given: Path | None, model: Path, scratch: Path) -> dict[str, Path]:
    if given is None:
        return make_adapters(model, scratch, ADAPTERS)
    return {name: given / name for name in NAMES}


def server_of(options: argparse.Namespace) -> Server:
    if options.vllm_python:
        return VLLM(options.vllm_python)
    if options.llama_server:
        return LlamaServer(options.llama_server, options.llama_models)
    return Loraplex(options.quantization)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--adapters", type=Path, help="where a000, … are; made when not given")
    parser.add_argument(
        "--cases", nargs="+", default=[""], help="only workloads whose label holds one of these"
    )
    parser.add_argument("--mark", default="", help="what every label is to begin with")
    parser.add_argument("--quick", action="store_true", help=quick.__doc__)
    parser.add_argument("--quantization", help="of our weights, as `loraplex serve` takes it")
    parser.add_argument("--vllm-python", type=Path, help="measure vLLM of this interpreter instead")
    parser.add_argument("--llama-server", type=Path, help="measure this llama-server instead")
    parser.add_argument("--llama-models", type=Path, help="where model.gguf, a000.gguf, … are")
    options = parser.parse_args()

    server = server_of(options)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        found = find_adapters(options.adapters, options.model, scratch)
        adapters = dict(list(found.items())[: server.max_adapters])
        workloads = choose(options.cases, {"base", *adapters})
        if options.quick:
            workloads = [quick(workload) for workload in workloads]
        workloads = sized_for(options.model, workloads)
        longest = max(workload.prompt + workload.output for workload in workloads)
        setup = Setup(options.model, adapters, free_port(), max_model_len=longest)
        benchmark(server, setup, workloads, scratch / "server.log", options.mark)


if __name__ == "__main__":
    main()
