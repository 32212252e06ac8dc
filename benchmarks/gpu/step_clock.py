"""StepClock: where the time of an engine's steps goes, on the host and on the GPU."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpu.case import Machine

from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.scheduling.scheduler import SchedulerOutput


@dataclass(frozen=True)
class Step:
    """One step: its time, the parts of it, and what was in it.

    Attributes:
        parts: seconds by name. `schedule`, `execute` and `update` follow each other. `sample` is
            the end of `execute` and includes the wait for the GPU. `gpu` is the GPU's own time
            from the beginning of `execute` to that of `sample`.
    """

    seconds: float
    parts: Mapping[str, float]
    num_rows: int
    num_tokens: int
    num_adapter_loads: int
    num_offloads: int
    num_fetches: int

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_rows


class StepClock:
    """Times the calls that a step of an engine consists of."""

    def __init__(self, engine: LLMEngine, machine: Machine) -> None:
        self._engine = engine
        self._events: list[torch.cuda.Event] | None = None
        if machine.device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._parts: dict[str, float] = {}
        self._output: SchedulerOutput | None = None
        runner, scheduler = engine._parts.runner, engine._parts.scheduler
        self._wrap(scheduler, "schedule")
        self._wrap(runner, "execute", mark=0)
        self._wrap(runner._sampler, "sample", mark=1)
        self._wrap(scheduler, "update")

    def run(self, before: Callable[[int], object] = lambda index: None) -> list[Step]:
        """Steps until nothing is left to do.

        Args:
            before: called with the number of each step before it.
        """
        steps: list[Step] = []
        while self._engine.has_work or self._engine.is_waiting:
            before(len(steps))
            step = self._step()
            if step.num_rows:
                steps.append(step)
            else:
                time.sleep(0.001)  # an adapter is being read
        return steps

    def _step(self) -> Step:
        self._parts = {}
        start = time.perf_counter()
        self._engine.step()
        seconds = time.perf_counter() - start
        output = self._output
        assert output is not None
        if self._events is not None and output.scheduled:
            self._events[1].synchronize()
            self._parts["gpu"] = self._events[0].elapsed_time(self._events[1]) / 1e3
        moves = output.step.moves
        return Step(
            seconds,
            self._parts,
            len(output.scheduled),
            output.num_tokens,
            len(output.step.adapter_loads),
            len(moves.offloads),
            len(moves.fetches),
        )

    def _wrap(self, owner: object, name: str, mark: int | None = None) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            if self._events is not None and mark is not None:
                self._events[mark].record()
            result = inner(*arguments)
            self._parts[name] = time.perf_counter() - start
            if name == "schedule":
                self._output = result
            return result

        setattr(owner, name, timed)


def medians(steps: Sequence[Step], machine: Machine) -> dict[str, Any]:
    """The facts to record of steps of one kind, of which there must be one at least."""
    facts: dict[str, Any] = {"ok": bool(steps), "steps": len(steps)}
    if not steps:
        return facts | {"why": "there was no such step"}
    if machine.interpreted:
        return facts
    names = sorted(set.intersection(*(set(step.parts) for step in steps)))
    parts = {name: statistics.median(step.parts[name] for step in steps) for name in names}
    return facts | {
        "seconds": statistics.median(step.seconds for step in steps),
        "slowest": max(step.seconds for step in steps),
        "parts": parts,
    }
