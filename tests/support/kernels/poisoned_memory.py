"""Memory that is handed out unwritten, full of NaN: what a kernel forgets to write is seen."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` fills floats with NaN and integers with their highest value."""
    torch._C._set_deterministic_algorithms(True)  # the public name imports a compiler, in seconds
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch._C._set_deterministic_algorithms(False)
