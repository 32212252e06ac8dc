"""The ahead-of-time check: what it finds, and that every kernel passes it."""

import importlib
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from loraplex.kernels.attention.spans import QuerySpans
from loraplex.kernels.attention.tiling import choose_tiling

ROOT = Path(__file__).parents[3]
DECODING = ("--models", "qwen2.5-0.5b", "--dtypes", "bfloat16", "--chips", "sm_90", "--steps", "16")


def aot_check(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: in this one kernels are interpreted."""
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "benchmarks/aot_check.py", *arguments],
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_kernels_of_a_small_model_compile_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    done = aot_check(tmp_path, *DECODING)

    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in ("attention", "expand", "gated", "rms_norm", "rotary", "shrink"):
        assert f"| sm_90 | {kernel}_kernel | bf16 |" in done.stdout


def test_a_kernel_beyond_a_limit_fails_the_check(tmp_path: Path) -> None:
    done = aot_check(tmp_path, *DECODING, "--kernels", "gated", "--max-spill", "-1")

    assert done.returncode == 1
    assert "sm_90 gated_kernel bf16 of qwen2.5-0.5b:\n  spills 0 bytes" in done.stdout


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_its_steps_cut_attention_in_every_way(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    models = importlib.import_module("aot.models")

    found: dict[str, set[tuple[bool, bool]]] = {model.name: set() for model in models.MODELS}
    for model, step in product(models.MODELS, models.STEPS):
        query = torch.empty(step.num_rows, model.heads, model.head_dim, dtype=dtype, device="meta")
        cache = torch.empty(9, model.kv_heads, 8, model.head_dim, dtype=dtype, device="meta")
        numbers = torch.empty(step.num_sequences + 1, dtype=torch.int64, device="meta")
        spans = QuerySpans(numbers, numbers[1:], step.longest_query, models.MAX_SEQ_LEN)
        tiling = choose_tiling(query, cache, cache, spans, None)
        found[model.name].add((tiling.one_tile, tiling.splits > 1))

    every_way = set(product((False, True), repeat=2))
    assert {name: every_way - ways for name, ways in found.items() if ways != every_way} == {}


def test_a_kernel_is_checked_for_every_generation_that_has_tensor_cores_for_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    binary = importlib.import_module("aot.binary")

    limits = {chip.name: chip.shared_bytes // 1024 for chip in binary.CHIPS}
    assert limits == {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227}


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_every_kernel_of_every_model_compiles_for_every_chip(tmp_path: Path) -> None:
    done = aot_check(tmp_path, "--jobs", str(os.cpu_count()))

    assert done.returncode == 0, done.stdout + done.stderr
