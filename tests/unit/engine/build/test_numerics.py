"""Engines whose kernels may differ in a bit do not call their numerics equal."""

import torch

from loraplex.engine.build.numerics import numerics_of
from loraplex.kernels.dispatch import choose_kernels

CPU = torch.device("cpu")


def test_each_set_of_kernels_has_numerics_of_its_own() -> None:
    asked = ("auto", "naive")
    names = [numerics_of(choose_kernels(name, CPU, torch.float32), CPU) for name in asked]

    assert names[0] != names[1]
    assert all("; torch 2." in name for name in names)


def test_native_kernels_are_named_by_what_they_were_built_from() -> None:
    name = numerics_of(choose_kernels("auto", CPU, torch.bfloat16), CPU)

    kind, digest = name.split("; ")[0].removeprefix("loraplex-").rsplit("-", 1)
    assert kind in ("avx2", "avx512", "avx512_bf16")
    assert len(digest) == 32
