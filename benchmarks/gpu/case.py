"""Case: one operation at one shape, how its result is judged, and how fast it should be."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

# Relative L2 error that rounding inputs and results to a dtype explains.
FLOORS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}
LAUNCH = 1.5e-6  # seconds that a launch takes by itself, in a graph


@dataclass(frozen=True)
class Ceilings:
    """What this GPU can do, measured in the same run."""

    copy: float  # bytes per second, read and written ones together
    read: float  # bytes per second
    matmul: float  # bfloat16 operations per second


@dataclass(frozen=True)
class Machine:
    device: torch.device
    ceilings: Ceilings | None  # None: not measured
    interpreted: bool  # tiny shapes, and nothing is timed: as in Triton's interpreter


@dataclass(frozen=True)
class Goal:
    """At most the time that the ceilings allow, over `share`, and so much for each launch."""

    share: float
    launches: int = 0
    at_most: float | None = None  # seconds, whatever the ceilings say

    def seconds(self, num_bytes: float, flops: float, ceilings: Ceilings) -> float:
        if self.at_most is not None:
            return self.at_most
        least = max(num_bytes / ceilings.copy, flops / ceilings.matmul)
        return least / self.share + self.launches * LAUNCH


@dataclass(frozen=True)
class Timed:
    """A workload to be timed, beside others that do the same."""

    run: Callable[[], object]
    num_bytes: float = 0  # that it must read and write, each once
    flops: float = 0
    times: int = 1  # how often `run` does the work, on other data each time
    goal: Goal | None = None
    peers: Mapping[str, Callable[[], object]] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Case:
    """`run` computes into fresh memory; it is right where it comes close enough to `expected`."""

    name: str
    run: Callable[[], Tensor]
    expected: Callable[[], Tensor]
    floor: float  # bound of the relative L2 error; 0: equal bit by bit
    timed: Timed | None = None
    may_not_fit: bool = False  # too large for some GPUs, which is recorded and is no fault


@dataclass(frozen=True)
class Fact:
    """Something found out that is no single operation: `facts` as they are to be recorded."""

    name: str
    facts: Mapping[str, object]
