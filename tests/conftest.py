"""What every test may use."""

import pytest

pytest_plugins = ["support.demo_model"]


@pytest.fixture
def anyio_backend() -> str:
    """Async tests, marked `anyio`, run under asyncio."""
    return "asyncio"
