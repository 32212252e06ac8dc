"""Binary: what the compiler made of a launch for one kind of GPU."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_REGISTERS = 64 * 1024  # of a multiprocessor; each warp takes them in units of 256
_RESERVED = 1024  # bytes of shared memory that the system keeps of each block
_INSTRUCTIONS = {
    "HGMMA": r"\bHGMMA\.",
    "HMMA": r"\bHMMA\.",
    "asynchronous loads": r"\bLDGSTS\.",
    "loads of 128 bits": r"\b(LDG|LDGSTS)\.E\S*\.128",
    "loads of 16 bits or less": r"\bLDG\.E\S*\.[US](8|16)",
    "local memory": r"\b(LDL|STL)\b",
}


@dataclass(frozen=True)
class Chip:
    """Limits of a kind of GPU, from NVIDIA's CUDA programming guide."""

    name: str
    target: GPUTarget
    shared_bytes: int  # that one block may take
    blocks: int = 32  # that one multiprocessor may hold
    threads: int = 2048  # that one multiprocessor may hold


CHIPS = (
    Chip("sm_80", GPUTarget("cuda", 80, 32), 163 * 1024),
    Chip("sm_86", GPUTarget("cuda", 86, 32), 99 * 1024, blocks=16, threads=1536),
    Chip("sm_89", GPUTarget("cuda", 89, 32), 99 * 1024, blocks=24, threads=1536),
    Chip("sm_90", GPUTarget("cuda", 90, 32), 227 * 1024),
)


@dataclass(frozen=True)
class Binary:
    registers: int  # per thread
    spill_bytes: int  # stored and loaded per thread, by the compiler's own count
    shared_bytes: int  # per block
    blocks_per_sm: int
    instructions: dict[str, int]  # how many of each kind stand in the code


def inspect(compiled: Any, chip: Chip) -> Binary:
    """Reads a compiled kernel with the tools that Triton's wheel carries."""
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(compiled.asm["ptx"])
        report, code = _assemble(ptx, cubin), _run(str(_TOOLS / "nvdisasm"), "-c", str(cubin))
    registers = int(_find(r"Used (\d+) registers", report))
    spills = _find(r"(\d+) bytes spill stores", report), _find(r"(\d+) bytes spill loads", report)
    shared = int(compiled.metadata.shared)
    warps = int(compiled.metadata.num_warps)
    return Binary(
        registers=registers,
        spill_bytes=sum(map(int, spills)),
        shared_bytes=shared,
        blocks_per_sm=min(
            chip.blocks,
            chip.threads // (32 * warps),
            _REGISTERS // (-(-registers * 32 // 256) * 256 * warps),
            (chip.shared_bytes + _RESERVED) // (shared + _RESERVED),
        ),
        instructions={name: len(re.findall(p, code)) for name, p in _INSTRUCTIONS.items()},
    )


def _assemble(ptx: Path, cubin: Path) -> str:
    """-> ptxas's report. The spills stand nowhere else."""
    architecture = _find(r"\.target (sm_\w+)", ptx.read_text())
    ptxas = get_ptxas(int(_find(r"sm_(\d+)", architecture))).path  # Triton's own choice
    return _run(ptxas, "-v", f"--gpu-name={architecture}", str(ptx), "-o", str(cubin))


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"nothing like {pattern} in: {text[:500]}")
    return found.group(1)


def _run(tool: str, *arguments: str) -> str:
    command = [tool, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
