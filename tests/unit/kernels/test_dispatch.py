"""Which kernels a model gets, and what the operator is told."""

import logging

import pytest
import torch
import triton
from support.kernels.fake_cuda import fake_cuda

from loraplex.kernels import dispatch
from loraplex.kernels.dispatch import NAIVE, choose_kernels
from loraplex.kernels.kernel_set import KernelsUnavailable
from loraplex.kernels.native.build import NativeUnavailable, find_compiler
from loraplex.kernels.sampling import triton as sampling

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_naive_kernels_are_given_to_who_asks_for_them(dtype: torch.dtype) -> None:
    assert choose_kernels("naive", CPU, dtype) is NAIVE


def test_another_device_gets_the_naive_kernels() -> None:
    assert choose_kernels("auto", torch.device("meta"), torch.bfloat16) is NAIVE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_gets_the_triton_kernels(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda(monkeypatch):
        assert choose_kernels("auto", torch.device("cuda"), dtype).name == "triton"


def no_compiler(_x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("Failed to find C compiler.\nPlease specify one.")


def test_a_gpu_on_which_no_kernel_runs_gets_the_naive_ones_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sampling, "argmax", no_compiler)

    with fake_cuda(monkeypatch):
        chosen = choose_kernels("auto", torch.device("cuda"), torch.bfloat16)

    assert chosen is NAIVE
    assert caplog.messages == [
        "no Triton on this GPU, running on plain torch, which is slower: Failed to find C compiler."
    ]


def test_who_asks_for_triton_is_told_that_no_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "argmax", no_compiler)

    with fake_cuda(monkeypatch), pytest.raises(KernelsUnavailable, match="Failed to find C comp"):
        choose_kernels("triton", torch.device("cuda"), torch.bfloat16)


def test_a_format_without_triton_kernels_gets_the_naive_ones() -> None:
    assert choose_kernels("auto", torch.device("cuda"), torch.float64) is NAIVE


@pytest.mark.parametrize(("interpret", "name"), [(True, "triton"), (False, "naive")])
def test_a_cpu_gets_the_triton_kernels_only_to_interpret_them(
    interpret: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", interpret)

    assert choose_kernels("triton", CPU, torch.float32).name == name


def test_a_format_without_native_kernels_gets_the_naive_ones() -> None:
    assert choose_kernels("auto", CPU, torch.float16) is NAIVE


def test_without_a_compiler_the_naive_kernels_run_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "native", lambda: find_compiler(("no-such-compiler",)))

    with caplog.at_level(logging.WARNING):
        chosen = choose_kernels("auto", CPU, torch.float32)

    assert chosen is NAIVE
    (record,) = caplog.records
    assert "plain torch, which is slower: no C++ compiler found" in record.getMessage()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_kernels_are_chosen_where_they_can_be_had(dtype: torch.dtype) -> None:
    try:
        dispatch.native()
    except NativeUnavailable as error:
        pytest.skip(str(error))

    chosen = choose_kernels("auto", CPU, dtype)

    assert (chosen.name, dtype in chosen.linears.dtypes) == ("cpu", True)
