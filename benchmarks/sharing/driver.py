"""What the sharing benchmarks have in common: an engine in this process, requests, a record."""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from loraplex.adapters.manifest import AdapterRef
from loraplex.engine.config import EngineConfig
from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import GenerateRequest
from loraplex.engine.sampling_params import SamplingParams

sys.path.append(str(Path(__file__).parents[1]))
from machine import commit, describe, versions


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options of every sharing benchmark; its docstring is the help."""
    options = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("model", type=Path, help="a Hugging Face folder")
    options.add_argument("--threads", type=int, help="default: torch's choice")
    options.add_argument("--quick", action="store_true", help="tiny sizes: to see that it runs")
    options.add_argument(
        "--save", type=Path, help="file for the results, with machine and versions"
    )
    return options


@contextmanager
def open_engine(options: argparse.Namespace, **settings: Any) -> Iterator[LLMEngine]:
    """An engine with its own empty data folder; with `--quick` one of little memory."""
    if options.quick:
        settings = {"kv_cache_memory": 16 << 20} | settings
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=str(options.model),
            adapter_store=str(Path(folder) / "adapters"),
            num_threads=options.threads,
            **settings,
        )
        engine = LLMEngine.load(config)
        try:
            while engine.prepare():
                pass  # what a server would do while nobody asks for anything
            yield engine
        finally:
            engine.close()


def request(
    request_id: str,
    prompt: list[int],
    num_outputs: int,
    *,
    tenant: str = "tenant",
    adapter: AdapterRef | None = None,
    **options: Any,
) -> GenerateRequest:
    """A greedy request of exactly so many output tokens, in its tenant's own namespace."""
    return GenerateRequest(
        request_id=request_id,
        tenant=tenant,
        namespace=options.pop("namespace", f"of {tenant}"),
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True),
        adapter=adapter,
        **options,
    )


def random_prompt(engine: LLMEngine, num_tokens: int, seed: int) -> list[int]:
    """The same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    high = engine.info.vocab_size - 1
    return torch.randint(1, high, (num_tokens,), generator=generator).tolist()


def show(heads: list[str], rows: list[list[object]]) -> None:
    """Prints a Markdown table."""
    lines = [heads, ["---"] * len(heads), *([str(cell) for cell in row] for row in rows)]
    for line in lines:
        print(f"| {' | '.join(line)} |")


def save(options: argparse.Namespace, name: str, figures: object) -> None:
    """Writes the record where `--save` says, if it does."""
    if options.save is None:
        return
    record = {
        "benchmark": name,
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        "commit": commit(),
        "machine": describe(),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "figures": figures,
    }
    options.save.write_text(json.dumps(record, indent=1) + "\n")
