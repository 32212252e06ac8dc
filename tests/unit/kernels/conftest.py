"""The native kernels, in every build that this machine can run."""

import ctypes

import pytest

from loraplex.kernels.native import library as native_library
from loraplex.kernels.native.build import TARGETS, NativeUnavailable, cpu_flags
from loraplex.kernels.native.library import cache_folder, load


@pytest.fixture(params=TARGETS, ids=lambda target: target.name)
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """Makes the operations use the build for one kind of CPU."""
    if missing := request.param.cpu_flags - cpu_flags():
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    try:
        library = load(request.param, cache_folder())
    except NativeUnavailable as error:
        pytest.skip(str(error))
    monkeypatch.setattr(native_library, "native", lambda: library)
    return library
