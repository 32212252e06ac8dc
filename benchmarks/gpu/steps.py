"""Steps of an engine of an 8B's shape: every way of sampling, uneven and long contexts, prompts
beside decoding, adapters that are loaded and blocks that are offloaded."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.case import Fact, Machine
from gpu.engine import Ours, random_prompts
from gpu.models import QUARTER_OF_EIGHT_BILLION, TINY, Size, write_adapters, write_model
from gpu.step_clock import StepClock, medians

_WARM = 2  # steps of each kind that may compile
_SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature and top-p": {"temperature": 0.8, "top_p": 0.95, "seed": 1},
    "top-k and min-p": {"temperature": 0.8, "top_k": 50, "min_p": 0.05, "seed": 1},
    "logprobs": {"logprobs": 5},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1},
}


@dataclass(frozen=True)
class Sizes:
    model: Size
    rows: int
    prompt: int
    new_tokens: int
    long_prompt: int
    long_rows: int
    offloaded_rows: int
    offloaded_prompt: int
    kv_bytes: int  # for blocks: one batch of offloaded prompts and half of another
    host_bytes: int  # for offloaded blocks


_FULL = Sizes(
    QUARTER_OF_EIGHT_BILLION, 64, 512, 32, 32000, 4, 16, 2048, kv_bytes=3 << 29, host_bytes=4 << 30
)
_TINY = Sizes(TINY, 3, 9, 6, 90, 2, 3, 40, kv_bytes=14 << 12, host_bytes=1 << 20)


def steps(machine: Machine) -> Iterator[Fact]:
    sizes = _TINY if machine.interpreted else _FULL
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", sizes.model, machine)
        adapters = write_adapters(model, Path(folder) / "adapters", [16] * 4, 1.0)
        ours = Ours(model, sizes.model, adapters, sizes.rows, machine, max_adapter_slots=2)
        clock = StepClock(ours.engine, machine)
        yield ours.graphs(machine)
        for name, options in _SAMPLING.items():
            lengths = [sizes.prompt] * sizes.rows
            yield _decode(f"decode, {name}", lengths, ours, clock, sizes, machine, **options)
        uneven = [sizes.long_prompt, *[sizes.prompt] * (sizes.rows - 1)]
        yield _decode("decode, one long context among short", uneven, ours, clock, sizes, machine)
        long = [sizes.long_prompt] * sizes.long_rows
        yield _decode("decode, long contexts", long, ours, clock, sizes, machine)
        yield _mixed(ours, clock, sizes, machine)
        yield _adapter_loads(ours, clock, sizes, machine)
        ours.close()
        yield from _offloading(model, sizes, machine)


def _decode(
    name: str,
    lengths: list[int],
    ours: Ours,
    clock: StepClock,
    sizes: Sizes,
    machine: Machine,
    **options: Any,
) -> Fact:
    """Steps in which all rows decode."""
    prompts = _prompts(lengths, sizes)
    ours.add(prompts, [None] * len(prompts), sizes.new_tokens, **options)
    full = [step for step in clock.run() if step.is_decode and step.num_rows == len(prompts)]
    rows = f"{len(prompts)} rows of at most {max(lengths)} tokens"
    return Fact(f"{name}, {rows}", medians(full[_WARM:], machine))


def _mixed(ours: Ours, clock: StepClock, sizes: Sizes, machine: Machine) -> Fact:
    """Half of the rows decode while a prompt comes with each step."""
    half = sizes.rows // 2
    coming = _prompts([sizes.prompt] * (sizes.rows - half), sizes)
    decoding = _prompts([sizes.prompt] * half, sizes)
    ours.add(decoding, [None] * half, len(coming) + 2 * _WARM)

    def bring_one(index: int) -> None:
        if index >= _WARM and coming:
            ours.add([coming.pop()], [None], 1)

    found = [step for step in clock.run(bring_one) if not step.is_decode and step.num_rows > half]
    name = f"{half} rows decode beside a prompt of {sizes.prompt} tokens"
    return Fact(name, medians(found[min(_WARM, len(found) - 1) :], machine))


def _adapter_loads(ours: Ours, clock: StepClock, sizes: Sizes, machine: Machine) -> Fact:
    """Rows of the base model decode while adapters take turns in too few slots."""
    rows = sizes.rows // 2
    decoding = _prompts([sizes.prompt] * rows, sizes)
    ours.add(decoding, [None] * rows, 2 * sizes.new_tokens)
    coming = list(ours.refs)
    short = _prompts([4], sizes)

    def bring_one(index: int) -> None:
        if index >= _WARM and index % 2 == 0 and coming:
            ours.add(short, [coming.pop()], 1)

    found = [step for step in clock.run(bring_one) if step.num_adapter_loads]
    return Fact(f"an adapter loaded beside {rows} rows that decode", medians(found, machine))


def _offloading(model: Path, sizes: Sizes, machine: Machine) -> Iterator[Fact]:
    """Two batches of prompts that do not fit together, the first of them twice."""
    ours = Ours(
        model,
        sizes.model,
        [],
        sizes.offloaded_rows,
        machine,
        max_adapter_slots=1,
        kv_cache_memory=sizes.kv_bytes,
        offload_memory=sizes.host_bytes,
        max_model_len=sizes.offloaded_prompt + 2 * sizes.new_tokens,
    )
    clock = StepClock(ours.engine, machine)
    lengths = [sizes.offloaded_prompt] * sizes.offloaded_rows
    first, second = _prompts(lengths, sizes, seed=1), _prompts(lengths, sizes, seed=2)
    found = []
    for prompts in (first, second, first):
        ours.add(prompts, [None] * len(prompts), sizes.new_tokens, namespace="shared")
        found += clock.run()
    ours.close()
    out = [step for step in found if step.num_offloads]
    back = [step for step in found if step.num_fetches]
    yield Fact("steps that offload blocks", medians(out, machine))
    yield Fact("steps that fetch blocks", medians(back, machine))


def _prompts(lengths: list[int], sizes: Sizes, seed: int = 1) -> list[list[int]]:
    whole = random_prompts(len(lengths), max(lengths), sizes.model.vocabulary, seed)
    return [prompt[:length] for prompt, length in zip(whole, lengths, strict=True)]
