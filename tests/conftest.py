"""What every test may use."""

import pytest

pytest_plugins = [
    "support.kernels.triton_interpreter",  # first: kernels are decorated for it or for a GPU
    "support.device_marks",
    "support.models.demo_model",
    "support.hypothesis_profile",
    "support.kernels.native_kernels",
    "support.kernels.poisoned_memory",
]


@pytest.fixture
def anyio_backend() -> str:
    """Async tests, marked `anyio`, run under asyncio."""
    return "asyncio"
