"""`-m gpu` selects what computes on a GPU, on a machine that has one."""

from collections.abc import Iterable

import pytest
from support.kernels.triton_interpreter import INTERPRETED


def mark_for_gpu(items: Iterable[pytest.Item]) -> None:
    """Marks `gpu` what is marked `device`."""
    for item in items:
        if item.get_closest_marker("device") is not None:
            item.add_marker(pytest.mark.gpu)


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a CPU all of them are everyday tests."""
    if not INTERPRETED:
        mark_for_gpu(items)
