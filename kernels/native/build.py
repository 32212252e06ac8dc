"""Builds the native kernels with the machine's C++ compiler, once per source and kind of CPU."""

import hashlib
import logging
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

KERNELS = Path(__file__).resolve().parents[1]
COMPILERS = ("g++", "c++")
TIMEOUT = 300.0  # seconds for one source
_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fno-math-errno")


class NativeUnavailable(Exception):
    """Raised where the native kernels are not available on this machine; the message says why."""


@dataclass(frozen=True)
class Target:
    """A kind of CPU: the features that it must have and that the compiler may therefore use."""

    name: str
    cpu_flags: frozenset[str]  # as /proc/cpuinfo spells them
    compiler_flags: tuple[str, ...]


_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_AVX512_CPU = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"})
TARGETS = (  # the best first
    Target(
        "avx512_bf16",
        _AVX512_CPU | {"avx512_bf16", "avx512_vnni"},
        (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
    ),
    Target("avx512", _AVX512_CPU, _AVX512),
    Target("avx2", frozenset({"avx2", "fma"}), _AVX2),
)


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Returns the CPU's features; empty where the system does not list them."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return frozenset()
    lines = (line.partition(":") for line in text.splitlines())
    return next(
        (frozenset(flags.split()) for key, _, flags in lines if key.strip() == "flags"), frozenset()
    )


def choose_target(flags: frozenset[str]) -> Target:
    """Returns the best target that a CPU with these flags can run.

    Raises:
        NativeUnavailable: it can run none.
    """
    for target in TARGETS:
        if target.cpu_flags <= flags:
            return target
    raise NativeUnavailable("this CPU has neither AVX-512 nor AVX2")


def find_compiler(names: tuple[str, ...] = COMPILERS) -> str:
    """Returns the path of the first of these C++ compilers that exists.

    Raises:
        NativeUnavailable: there is none.
    """
    for name in names:
        if path := shutil.which(name):
            return path
    raise NativeUnavailable(f"no C++ compiler found ({' or '.join(names)}); install g++")


def build(target: Target, compiler: str, folder: Path) -> Path:
    """Returns the shared library for a target, from `folder` or else compiled into it.

    Several processes may build at once: each compiles aside and moves its result into place.

    Raises:
        NativeUnavailable: the compiler failed, or the folder cannot be written.
    """
    sources = sorted(KERNELS.glob("*/*.cpp"))
    headers = sorted(KERNELS.glob("*/*.h"))
    flags = (*_FLAGS, *target.compiler_flags)
    version = _run(compiler, "--version")
    digest = hashlib.sha256("\0".join((version, *flags)).encode())
    for path in (*sources, *headers):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    library = folder / f"loraplex-{target.name}-{digest.hexdigest()[:32]}.so"
    if not library.exists():
        logger.info("compiling the native kernels for %s with %s", target.name, compiler)
        try:
            _compile(sources, (compiler, *flags), library)
        except OSError as error:
            raise NativeUnavailable(f"cannot write {library}: {error}") from error
    return library


def _compile(sources: list[Path], command: tuple[str, ...], library: Path) -> None:
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as aside:
        objects = [str(Path(aside, f"{i}.o")) for i in range(len(sources))]

        def compile_one(source: Path, target: str) -> None:
            _run(*command, "-I", str(KERNELS), "-c", str(source), "-o", target)

        with ThreadPoolExecutor(max_workers=4) as pool:
            list(pool.map(compile_one, sources, objects))
        linked = Path(aside, library.name)
        _run(command[0], "-shared", *objects, "-o", str(linked))
        linked.replace(library)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} did not run: {error}") from error
    if done.returncode != 0:
        raise NativeUnavailable(f"{command[0]} failed: {done.stderr.strip()[:2000]}")
    return done.stdout
