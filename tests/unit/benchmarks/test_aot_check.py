"""The ahead-of-time check: what it finds, and that every kernel passes it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_kernel_of_every_model_compiles_for_every_chip(tmp_path: Path) -> None:
    done = aot_check(tmp_path, "--jobs", str(os.cpu_count()))

    assert done.returncode == 0, done.stdout + done.stderr
