"""The native kernels, in every build that this machine can run."""

import ctypes
from types import ModuleType

import pytest

from loraplex.kernels.attention import cpu as attention_cpu
from loraplex.kernels.gated_activation import cpu as gated_activation_cpu
from loraplex.kernels.kv_cache import cpu as kv_cache_cpu
from loraplex.kernels.linear import cpu as linear_cpu
from loraplex.kernels.lora import cpu as lora_cpu
from loraplex.kernels.native.build import TARGETS, NativeUnavailable, cpu_flags
from loraplex.kernels.native.library import cache_folder, load
from loraplex.kernels.rms_norm import cpu as rms_norm_cpu

USERS: tuple[ModuleType, ...] = (
    attention_cpu,
    gated_activation_cpu,
    kv_cache_cpu,
    linear_cpu,
    lora_cpu,
    rms_norm_cpu,
)


@pytest.fixture(params=TARGETS, ids=lambda target: target.name)
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """Makes the operations use the build for one kind of CPU."""
    if missing := request.param.cpu_flags - cpu_flags():
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    try:
        library = load(request.param, cache_folder())
    except NativeUnavailable as error:
        pytest.skip(str(error))
    for module in USERS:
        monkeypatch.setattr(module, "native", lambda: library)
    return library
