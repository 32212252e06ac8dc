"""What every test may use."""

import pytest

pytest_plugins = [
    "support.triton_interpreter",  # first: kernels are decorated for it or for a GPU
    "support.demo_model",
    "support.hypothesis_profile",
    "support.native_kernels",
    "support.poisoned_memory",
]


@pytest.fixture
def anyio_backend() -> str:
    """Async tests, marked `anyio`, run under asyncio."""
    return "asyncio"
