"""Which kernels a model gets, and what the operator is told."""

import logging

import pytest
import torch
import triton

from loraplex.kernels import dispatch
from loraplex.kernels.dispatch import NAIVE, choose_kernels
from loraplex.kernels.native.build import NativeUnavailable, find_compiler

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_naive_kernels_are_given_to_who_asks_for_them(dtype: torch.dtype) -> None:
    assert choose_kernels("naive", CPU, dtype) is NAIVE


def test_another_device_gets_the_naive_kernels() -> None:
    assert choose_kernels("auto", torch.device("meta"), torch.bfloat16) is NAIVE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_gets_the_triton_kernels(dtype: torch.dtype) -> None:
    assert choose_kernels("auto", torch.device("cuda"), dtype).name == "triton"


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
