"""Tests that need our native kernels; a plugin that makes that a fixture everywhere."""

import pytest

from loraplex.kernels.native.build import NativeUnavailable
from loraplex.kernels.native.library import native


@pytest.fixture(scope="session")
def native_kernels() -> None:
    """Skips where this machine cannot build or run them, and says why."""
    try:
        native()
    except NativeUnavailable as error:
        pytest.skip(str(error))
