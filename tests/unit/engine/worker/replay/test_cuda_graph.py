"""CUDA graphs: for which sizes steps are recorded, and what becomes of one that cannot be."""

from collections.abc import Callable
from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kernels.fake_cuda import FakeRuntime, fake_runtime
from torch import Tensor

from loraplex.engine.worker.replay.cuda_graphs import CaptureRefused, CudaCapture, ladder


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (32, [1, 2, 4, 8, 16, 24, 32]),
    ],
)
def test_the_ladder_ends_with_the_largest_batch(max_rows: int, sizes: list[int]) -> None:
    assert ladder(max_rows) == sizes


@given(st.integers(1, 300))
def test_the_ladder_rises_by_few_rows_at_a_time(max_rows: int) -> None:
    sizes = ladder(max_rows)

    gaps = [b - a for a, b in zip([0, *sizes], sizes, strict=False)]
    assert 0 < min(gaps) <= max(gaps) <= 8


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    return fake_runtime(monkeypatch)


def logits_of(num_rows: int) -> Callable[[], Tensor]:
    return lambda: torch.full((num_rows, 10), float(num_rows))


def fails_at_call(number: int, error: Exception) -> Callable[[], Tensor]:
    """A forward pass that computes until it is called for the so-manieth time."""
    calls = count(1)

    def forward() -> Tensor:
        if next(calls) == number:
            raise error
        return torch.zeros(2, 10)

    return forward


@pytest.mark.usefixtures("runtime")
def test_all_graphs_put_their_logits_into_the_same_memory() -> None:
    capture = CudaCapture([1, 4, 8])

    graphs = [capture.capture(logits_of(rows)) for rows in (8, 4, 1)]

    assert len({graph.logits.data_ptr() for graph in graphs}) == 1
    assert [len(graph.logits) for graph in graphs] == [8, 4, 1]
    assert graphs[-1].logits[0, 0] == 1.0


SYNC = RuntimeError("called a synchronizing CUDA operation")
WARM_UP, RECORDING = 2, 3  # the calls of the forward pass in which it may break off


@pytest.mark.parametrize("call", [WARM_UP, RECORDING])
def test_what_cannot_be_recorded_is_refused_on_the_stream_that_was_current(
    runtime: FakeRuntime, call: int
) -> None:
    capture, before = CudaCapture([1, 4, 8]), runtime.current

    with pytest.raises(CaptureRefused):
        capture.capture(fails_at_call(call, SYNC))

    assert runtime.current is before


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("Failed to find C compiler"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
    ],
    ids=["no memory", "no compiler", "broken context"],
)
def test_what_is_wrong_with_the_gpu_is_not_taken_for_a_pass_that_cannot_be_recorded(
    error: RuntimeError,
) -> None:
    with pytest.raises(RuntimeError, match=str(error)):
        CudaCapture([1, 4, 8]).capture(fails_at_call(1, error))


@pytest.mark.usefixtures("runtime")
def test_after_a_refusal_another_pass_is_recorded() -> None:
    capture = CudaCapture([1, 4, 8])
    with pytest.raises(CaptureRefused):
        capture.capture(fails_at_call(RECORDING, SYNC))

    assert capture.capture(logits_of(4)).logits.tolist() == [[4.0] * 10] * 4
