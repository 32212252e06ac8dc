"""The kernels' tiny cases on the GPU under NVIDIA's compute-sanitizer, which finds what a right
result can hide: memory that is not a tensor's, and threads that race for shared memory."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gpu.case import Fact, Machine
from gpu.record import Records

_TOOLS = ("memcheck", "racecheck")
_GROUPS = ("decode", "prefill", "lora", "cache", "rows")
_SCRIPT = Path(__file__).parents[1] / "gpu_check.py"
_SECONDS = 120  # that one group may take under one tool
_FOUND = 9  # exit status where a tool has found something


def sanitizer(machine: Machine) -> Iterator[Fact]:
    """Without a GPU one group runs as it would, under no tool."""
    if machine.interpreted:
        yield _check("no tool", "cache", [], "--interpret")
        return
    program = shutil.which("compute-sanitizer")
    if program is None:
        why = "compute-sanitizer is not on PATH; it comes with NVIDIA's CUDA toolkit"
        yield Fact("not run", {"ok": False, "why": why})
        return
    for tool in _TOOLS:
        command = [program, "--tool", tool, "--error-exitcode", str(_FOUND)]
        for group in _GROUPS:
            yield _check(tool, group, command, "--tiny")


def _check(tool: str, group: str, prefix: list[str], shapes: str) -> Fact:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "records.json")
        records = Records(file)
        records.write({"records": []})
        command = [*prefix, sys.executable, str(_SCRIPT), shapes, "--child", group]
        command += ["--json", str(file), "--deadline", str(_SECONDS)]
        # A caching allocator would hide what lies beyond a tensor but within its own memory.
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=2 * _SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Fact(f"{tool}, {group}", {"ok": False, "why": f"more than {2 * _SECONDS} s"})
        verdicts = [record.get("ok") for record in records.all()]
    ok = done.returncode == 0 and bool(verdicts) and False not in verdicts
    facts = {"ok": ok, "cases": len(verdicts), "status": done.returncode}
    if not ok:
        facts["trace"] = (done.stdout + done.stderr)[-4000:]
    return Fact(f"{tool}, {group}", facts)
