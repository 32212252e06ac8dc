"""OpenVINO GenAI with LoRA adapters on a CPU, in process. Run with the interpreter that has it.

    PYTHON benchmarks/peers/openvino_batch.py EXPORTED ADAPTERS [--cases TEXT …] [--quick]

EXPORTED holds the model as `bf16` and as `int8`, exported as benchmarks/README.md says. The
standard workload of benchmarks/serving, eight prompts in one call where a server has eight requests
in flight. An adapter belongs to the whole pipeline there, so eight adapters take turns, one call
each. One JSON line per case, with the prefix cache on and the shared prefix in it.
"""

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai

BATCH = 8
REPEATS = 3
ALPHA = 2.0  # lora_alpha / r: the library does not read adapter_config.json
NO_ADAPTER = genai.AdapterConfig()


def scheduler() -> genai.SchedulerConfig:
    config = genai.SchedulerConfig()
    config.cache_size = 2  # GiB
    config.enable_prefix_caching = True
    config.max_num_batched_tokens = 512
    config.dynamic_split_fuse = True
    return config


class Pipeline:
    def __init__(self, folder: Path, adapters: list[genai.Adapter]) -> None:
        options = {"INFERENCE_NUM_THREADS": os.cpu_count(), "INFERENCE_PRECISION_HINT": "bf16"}
        if adapters:
            options["adapters"] = genai.AdapterConfig(adapters)
        self._has_adapters = bool(adapters)
        self._pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler(), "CPU", options)

    def generate(
        self, prompts: list[list[int]], new_tokens: int, adapter: genai.Adapter | None = None
    ) -> None:
        """Exactly `new_tokens` for each prompt, all through one adapter or through none."""
        config = genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        if self._has_adapters:
            config.adapters = genai.AdapterConfig(adapter, ALPHA) if adapter else NO_ADAPTER
        rows = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        for result in self._pipeline.generate(rows, [config] * len(rows)):
            if len(result.m_generation_ids[0]) != new_tokens:
                raise RuntimeError(f"asked for {new_tokens} tokens, got another number")


class Prompts:
    """Random token ids; all begin with the same ones."""

    def __init__(self, shared: int, unique: int) -> None:
        self._rng = random.Random(0)
        self._unique = unique
        self._shared = self._ids(shared)

    def take(self, count: int) -> list[list[int]]:
        return [self._shared + self._ids(self._unique) for _ in range(count)]

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(10, 32000) for _ in range(count)]


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        shared, unique, self._output = (32, 5, 4) if options.quick else (256, 64, 64)
        self._prompts = Prompts(shared, unique)
        self._cases = options.cases

    def wants(self, *labels: str) -> bool:
        return any(text in label for text in self._cases for label in labels)

    def measure(
        self, label: str, pipeline: Pipeline, rows: int, adapters: list[genai.Adapter | None]
    ) -> None:
        """One call per adapter, each with `rows` prompts; the first round only fills the cache."""
        if not self.wants(label):
            return
        walls = []
        for _ in range(1 + REPEATS):
            prompts = [self._prompts.take(rows) for _ in adapters]
            start = time.perf_counter()
            for adapter, batch in zip(adapters, prompts, strict=True):
                pipeline.generate(batch, self._output, adapter)
            walls.append(time.perf_counter() - start)
        wall, requests = statistics.median(walls[1:]), rows * len(adapters)
        record = {
            "label": label,
            "requests": requests,
            "output": self._output,
            "wall_s": round(wall, 2),
            "output_tok_s": round(requests * self._output / wall, 1),
            "errors": 0,
        }
        print(json.dumps(record), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("exported", type=Path, help="where the folders bf16 and int8 are")
    parser.add_argument("adapters", type=Path, help="where a000, a001, … are")
    parser.add_argument("--cases", nargs="+", default=[""])
    parser.add_argument("--quick", action="store_true", help="prove that everything runs")
    options = parser.parse_args()
    bench = Bench(options)
    if bench.wants("base c1", "base c8"):
        plain = Pipeline(options.exported / "bf16", [])
        bench.measure("base c1", plain, 1, [None])
        bench.measure("base c8", plain, BATCH, [None])
        del plain
    if bench.wants("one adapter c8", "base + 8 adapters c8"):
        files = [options.adapters / f"a{index:03d}" for index in range(BATCH)]
        adapters = [genai.Adapter(str(file / "adapter_model.safetensors")) for file in files]
        lora = Pipeline(options.exported / "bf16", adapters)
        bench.measure("one adapter c8", lora, BATCH, adapters[:1])
        bench.measure("base + 8 adapters c8", lora, 1, adapters)
        del lora
    if bench.wants("INT8 base c8"):
        bench.measure("INT8 base c8", Pipeline(options.exported / "int8", []), BATCH, [None])


if __name__ == "__main__":
    main()
