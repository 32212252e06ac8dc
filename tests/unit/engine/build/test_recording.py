"""What goes wrong on a GPU at the start, told with what to change."""

import pytest
import torch
from support.kernels.fake_cuda import fake_runtime
from triton.runtime.errors import OutOfResources

from loraplex.engine.build.recording import gpu_faults_refused
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import ConfigRefused

CONFIG = EngineConfig(model="m", adapter_store="s", max_num_seqs=64, max_num_batched_tokens=4096)


def test_lack_of_memory_is_told_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runtime(monkeypatch).free_bytes = 3 << 30

    with (
        pytest.raises(ConfigRefused, match=r"4,096 tokens and 64 sequences .* 3\.0 GiB of 6\.0"),
        gpu_faults_refused(CONFIG),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_kernel_that_the_gpu_cannot_run_is_told_with_the_way_around_it() -> None:
    with (
        pytest.raises(ConfigRefused, match=r"out of resource: shared memory.*--kernels naive"),
        gpu_faults_refused(CONFIG),
    ):
        raise OutOfResources(200_000, 100_000, "shared memory")


def test_other_faults_stay_what_they_are() -> None:
    with pytest.raises(KeyError), gpu_faults_refused(CONFIG):
        raise KeyError("x")
