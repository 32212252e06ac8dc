"""What this machine is, and the most that it can do."""

import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from gpu.case import Ceilings, Fact, Machine
from gpu.timing import seconds

_PACKAGES = ("torch", "triton", "transformers", "peft", "msgspec", "numpy")


def ceilings(machine: Machine) -> Iterator[Fact]:
    yield Fact("versions", {"python": platform.python_version(), **_versions()})
    yield Fact("versions that Loraplex is tested with", _locked())
    if machine.interpreted:
        return
    properties = torch.cuda.get_device_properties(machine.device)
    device = {
        "name": properties.name,
        "processors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "cuda": torch.version.cuda,
    }
    yield Fact("device", device)
    yield Fact("measured", asdict(_measure()))


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _locked() -> dict[str, str]:
    lines = (Path(__file__).parents[2] / "requirements.lock").read_text().splitlines()
    pairs = (line.partition(";")[0].strip().partition("==") for line in lines)
    return {name: number for name, _, number in pairs if name in _PACKAGES}


def _measure() -> Ceilings:
    return Ceilings(*_memory_rates(), _matmul_rate())


def _memory_rates() -> tuple[float, float]:
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.numel() / _best(lambda: target.copy_(source))
    return copy, source.numel() / _best(source.view(torch.int32).max)


def _matmul_rate() -> float:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn_like(a)
    return 2 * 8192**3 / _best(lambda: a @ b)


def _best(run: Callable[[], object]) -> float:
    return min(seconds(run) for _ in range(3))
