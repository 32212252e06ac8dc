"""The groups of cases, each run in a process of its own, and the seconds that each may take."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from gpu.case import Case, Fact, Machine


@dataclass(frozen=True)
class Group:
    module: str  # whose function of the group's name makes its cases
    seconds: float
    needs: tuple[str, ...] = ()  # modules that may be missing where only kernels are checked
    is_default: bool = True  # run where no group is named


_OF_ENGINE = (
    "transformers",
    "tokenizers",
    "safetensors",
    "peft",
    "msgspec",
    "filelock",
    "psutil",
)
GROUPS = {
    "ceilings": Group("gpu.ceilings", 40),
    "decode": Group("gpu.attention", 110),
    "prefill": Group("gpu.attention", 50),
    "lora": Group("gpu.lora", 110),
    "cache": Group("gpu.cache", 25),
    "rows": Group("gpu.rows", 40),
    "offload": Group("gpu.offload", 30),
    "robust": Group("gpu.robust", 30),
    "engine": Group("gpu.engine", 180, needs=_OF_ENGINE),
    "steps": Group("gpu.steps", 240, needs=_OF_ENGINE, is_default=False),
    "sweep": Group("gpu.sweep", 90, is_default=False),
    "sanitizer": Group("gpu.sanitizer", 180, is_default=False),
}


def make_cases(group: str, machine: Machine) -> Iterator[Case | Fact]:
    """One by one, so that the memory of one is free before the next."""
    made: Iterator[Case | Fact] = getattr(import_module(GROUPS[group].module), group)(machine)
    return made
