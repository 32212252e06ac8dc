"""What computes on a GPU where there is one says so, and is found by `-m gpu` there."""

from pathlib import Path

import pytest
from support.device_marks import mark_for_gpu

TESTS = Path(__file__).parents[1]


def test_every_test_of_a_kernel_on_the_device_is_marked() -> None:
    kernels = [
        path for path in TESTS.glob("unit/kernels/test_*.py") if "DEVICE" in path.read_text()
    ]

    assert len(kernels) > 5
    assert [path.name for path in kernels if "pytest.mark.device" not in path.read_text()] == []


@pytest.mark.device
def test_what_is_marked_for_the_device_runs_as_a_gpu_test_on_a_gpu(
    request: pytest.FixtureRequest,
) -> None:
    mark_for_gpu([request.node])

    assert request.node.get_closest_marker("gpu") is not None


def test_what_is_not_marked_does_not(request: pytest.FixtureRequest) -> None:
    mark_for_gpu([request.node])

    assert request.node.get_closest_marker("gpu") is None
