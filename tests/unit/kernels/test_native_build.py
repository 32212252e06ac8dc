"""How the native kernels are compiled, kept and refused."""

import os
from pathlib import Path

import pytest

from loraplex.kernels.native.build import (
    TARGETS,
    NativeUnavailable,
    Target,
    build,
    choose_target,
    cpu_flags,
    find_compiler,
)


@pytest.fixture
def compiler() -> str:
    try:
        return find_compiler()
    except NativeUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_cpu_gets_the_best_build_that_it_can_run(target: Target) -> None:
    assert choose_target(target.cpu_flags | {"sse2"}) is target


def test_a_cpu_without_wide_vectors_is_told_so() -> None:
    with pytest.raises(NativeUnavailable, match="neither AVX-512 nor AVX2"):
        choose_target(frozenset({"sse2", "avx"}))


def test_a_system_that_does_not_describe_its_cpu_has_no_flags(tmp_path: Path) -> None:
    assert cpu_flags(tmp_path / "absent") == frozenset()


def test_a_missing_compiler_is_named() -> None:
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler found .*install g\+\+"):
        find_compiler(("no-such-compiler",))


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "out of cheese" >&2\nexit 1\n'
    )
    broken.chmod(0o755)

    with pytest.raises(NativeUnavailable, match="out of cheese"):
        build(TARGETS[-1], str(broken), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_that_is_a_file_is_refused(compiler: str, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")

    with pytest.raises(NativeUnavailable, match="cannot write"):
        build(TARGETS[-1], compiler, tmp_path / "cache")


def test_a_library_is_compiled_once(compiler: str, tmp_path: Path) -> None:
    first = build(TARGETS[-1], compiler, tmp_path)
    made = first.stat().st_mtime_ns

    assert build(TARGETS[-1], compiler, tmp_path) == first
    assert first.stat().st_mtime_ns == made
    assert os.listdir(tmp_path) == [first.name]
