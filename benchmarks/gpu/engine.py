"""The engine in process: tokens as PEFT's, then decode steps with 0, 1, 8 and 64 adapters."""

import gc
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu.case import LAUNCH, Fact, Machine
from gpu.models import ONE_BILLION, SMALL, TINY, Size, write_adapters, write_model
from gpu.peft_peer import Peft
from support.engine.engines import drain, register, request

from loraplex.adapters.manifest import AdapterRef
from loraplex.engine.config import EngineConfig
from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import GenerateRequest, TokenEvent

MIXED_RANKS = (4, 8, 16, 32)
_STRONG = 10.0  # times the usual B: an adapter that is left out shows in the first tokens
_LORA_LAUNCHES = 8  # of each layer


class Ours:
    """An engine with adapters registered, which takes so many rows at once."""

    def __init__(
        self,
        folder: Path,
        size: Size,
        adapters: Sequence[Path],
        rows: int,
        machine: Machine,
        **settings: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "model": str(folder),
            "adapter_store": str(folder.parent / "store"),
            "device": machine.device.type,
            "dtype": str(size.dtype).removeprefix("torch."),
            "kernels": "triton",
            "block_size": 16,
            "max_num_seqs": rows,
            "max_num_batched_tokens": max(rows, 4096),
            "max_adapter_slots": len(adapters),
            "kv_cache_memory": (1 << 22) if machine.interpreted else (8 << 30),
        }
        self.engine = LLMEngine.load(EngineConfig(**defaults | settings))
        self.infos = [register(self.engine, adapter) for adapter in adapters]
        self.refs = [info.ref for info in self.infos]
        self._count = 0

    def tokens(
        self, prompts: list[list[int]], adapters: Sequence[AdapterRef | None], new_tokens: int
    ) -> list[list[int]]:
        """Greedy tokens; all prompts at once."""
        requests = self.add(prompts, adapters, new_tokens)
        found: dict[str, list[int]] = {item.request_id: [] for item in requests}
        for event in drain(self.engine):
            if isinstance(event, TokenEvent):
                found[event.request_id] += event.token_ids
        return list(found.values())

    def step_seconds(
        self, prompts: list[list[int]], adapters: Sequence[AdapterRef | None], new_tokens: int
    ) -> tuple[float, float]:
        """-> (median of the steps in which all rows decode, all seconds)"""
        self.add(prompts, adapters, new_tokens)
        steps, begin = [], time.perf_counter()
        while self.engine.has_work or self.engine.is_waiting:
            start = time.perf_counter()
            events = self.engine.step()
            if len(events) == len(prompts):
                steps.append(time.perf_counter() - start)
        return statistics.median(steps[2:]), time.perf_counter() - begin

    def add(
        self,
        prompts: Sequence[list[int]],
        adapters: Sequence[AdapterRef | None],
        new_tokens: int,
        namespace: str | None = None,
        **options: Any,
    ) -> list[GenerateRequest]:
        """Adds a request for each prompt.

        Args:
            namespace: None: one of this call's own, in which no prefix is cached.
            options: of the requests' sampling.
        """
        self._count += 1
        requests = [
            request(
                prompt,
                f"{self._count}-{i}",
                namespace=namespace or str(self._count),
                adapter=adapter,
                max_tokens=new_tokens,
                **options,
            )
            for i, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True))
        ]
        for item in requests:
            self.engine.add(item)
        return requests

    def graphs(self, machine: Machine) -> Fact:
        """Which steps are replayed; right where all are that can be."""
        text = self.engine.info.recorded_steps
        recorded, _, others = text.partition(" of ")
        ok = machine.interpreted or others == f"{recorded} CUDA graphs"
        return Fact(f"recorded for {self.engine.info.max_num_seqs} rows", {"ok": ok, "why": text})

    def without_graphs(self) -> None:
        self.engine._parts.runner._recorded = None  # there is no setting for what nobody wants

    def close(self) -> None:
        self.engine.close()
        del self.engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def engine(machine: Machine) -> Iterator[Fact]:
    with tempfile.TemporaryDirectory() as folder:
        yield from _tokens_as_peft(Path(folder), machine)
    with tempfile.TemporaryDirectory() as folder:
        yield from _steps(Path(folder), machine)


def random_prompts(rows: int, length: int, vocabulary: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, vocabulary, (rows, length), generator=generator).tolist()


def _tokens_as_peft(folder: Path, machine: Machine) -> Iterator[Fact]:
    """float32: base rows and adapters of mixed rank in one batch give PEFT's tokens."""
    size, rows, new_tokens = (TINY, 3, 3) if machine.interpreted else (SMALL, 8, 32)
    model = write_model(folder / "model", size, machine)
    ranks = [MIXED_RANKS[i % 4] for i in range(rows - 1)]
    adapters = write_adapters(model, folder / "adapters", ranks, _STRONG)
    prompts = random_prompts(rows, 9, size.vocabulary)
    ours = Ours(model, size, adapters, rows, machine)
    peft = Peft(model, adapters, size.dtype, machine)
    wanted = peft.generate(prompts, [None, *(a.name for a in adapters)], new_tokens)
    base = peft.generate(prompts, [None] * rows, new_tokens)
    facts: dict[str, Any] = {"adapters_change_tokens": wanted != base}
    found = ours.tokens(prompts, [None, *ours.refs], new_tokens)
    yield ours.graphs(machine)
    yield _compared("tokens as PEFT, mixed adapters", found, wanted, **facts)
    yield _compared(
        "tokens as PEFT, base only", ours.tokens(prompts, [None] * rows, new_tokens), base
    )
    ours.without_graphs()
    found = ours.tokens(prompts, [None, *ours.refs], new_tokens)
    yield _compared("tokens as PEFT, without graphs", found, wanted, **facts)
    ours.close()


def _compared(name: str, found: list[list[int]], wanted: list[list[int]], **facts: Any) -> Fact:
    same = sum(a == b for a, b in zip(found, wanted, strict=True))
    ok = same == len(wanted) and all(facts.values())
    return Fact(name, {"ok": ok, "rows": len(wanted), "rows_equal": same, **facts})


def _steps(folder: Path, machine: Machine) -> Iterator[Fact]:
    """Decode steps of a full batch: how much adapters cost over the base, beside their floor."""
    tiny = machine.interpreted
    size, rows, counts = (TINY, 3, (0, 2)) if tiny else (ONE_BILLION, 64, (0, 1, 8, 64))
    model = write_model(folder / "model", size, machine)
    ranks = [MIXED_RANKS[i % 4] for i in range(counts[-1])]
    adapters = write_adapters(model, folder / "adapters", ranks, 1.0)
    prompts = random_prompts(rows, 5 if tiny else 128, size.vocabulary)
    ours = Ours(model, size, adapters, rows, machine)
    yield ours.graphs(machine)
    yield from _our_steps(ours, prompts, counts, size, machine)
    ours.without_graphs()
    for fact in _our_steps(ours, prompts, counts, size, machine):
        yield Fact(f"{fact.name}, no graphs", fact.facts)
    ours.close()
    peft = Peft(model, adapters, size.dtype, machine)
    new_tokens = 2 if tiny else 16
    for count in counts:
        names = [adapters[i % count].name if count else None for i in range(rows)]
        seconds = peft.seconds(prompts, names, new_tokens)
        facts = {"ok": True} | _rate(rows * new_tokens / seconds, machine)
        yield Fact(f"PEFT, {rows} rows, {count} adapters", facts)


def _our_steps(
    ours: Ours, prompts: list[list[int]], counts: Sequence[int], size: Size, machine: Machine
) -> Iterator[Fact]:
    rows, new_tokens = len(prompts), 5 if machine.interpreted else 64
    base = 0.0
    for count in counts:
        mix = [ours.refs[i % count] if count else None for i in range(rows)]
        ours.tokens(prompts, mix, 2)  # brings the adapters in
        step, seconds = ours.step_seconds(prompts, mix, new_tokens)
        base = base or step
        num_bytes = sum(info.num_bytes for info in ours.infos[:count])
        facts = _step_facts(step, base, num_bytes, size, machine)
        facts |= _rate(rows * new_tokens / seconds, machine)
        yield Fact(f"{rows} rows, {count} adapters", facts)


def _rate(tokens_per_second: float, machine: Machine) -> dict[str, Any]:
    """Of all rows together, prefill included."""
    return {} if machine.interpreted else {"tokens_per_second": tokens_per_second}


def _step_facts(
    step: float, base: float, num_bytes: float, size: Size, machine: Machine
) -> dict[str, Any]:
    if machine.ceilings is None:
        return {"ok": True}
    launches = _LORA_LAUNCHES * size.layers * LAUNCH if num_bytes else 0.0
    goal = base + 1.55 * num_bytes / machine.ceilings.copy + launches
    return {
        "ok": True,
        "seconds": step,
        "over_base": step / base,
        "floor_over_base": 1 + num_bytes / machine.ceilings.copy / base,
        "goal": goal,
        "met": step <= goal,
    }
