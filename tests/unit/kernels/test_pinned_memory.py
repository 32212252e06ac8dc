"""Pinned memory: of the size that was asked for, and known to the driver as long as it is used."""

import gc

import pytest
import torch
from support.kernels.fake_cuda import FakeRuntime, fake_runtime

from loraplex.kernels.pinned_memory import pinned


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    return fake_runtime(monkeypatch)


def test_no_more_is_pinned_than_was_asked_for(runtime: FakeRuntime) -> None:
    tensor = pinned(3, 100_001, dtype=torch.bfloat16)

    assert runtime.pinned == {tensor.data_ptr(): 3 * 100_001 * 2}
    assert tensor.shape == (3, 100_001)


def test_memory_stays_pinned_while_a_part_of_it_is_used(runtime: FakeRuntime) -> None:
    part = pinned(8, dtype=torch.float32)[4:]
    gc.collect()

    assert len(runtime.pinned) == 1
    part.fill_(1.0)


def test_the_device_is_done_with_it_before_the_driver_lets_it_go(runtime: FakeRuntime) -> None:
    tensor = pinned(8, dtype=torch.float32)
    del tensor
    gc.collect()

    assert (runtime.pinned, runtime.num_waits) == ({}, 1)


def test_what_the_driver_refuses_is_an_error_that_says_how_much(runtime: FakeRuntime) -> None:
    runtime.status = 2

    with pytest.raises(OSError, match="pins no 4,096 bytes of host memory"):
        pinned(1024, dtype=torch.float32)
