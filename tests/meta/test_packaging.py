"""The layer folders are the package `loraplex`: in the tree, in a wheel, in an editable install."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
LINKS = (link for link in (ROOT / "src" / "loraplex").iterdir() if link.is_symlink())
LAYERS = sorted(link.name for link in LINKS if link.exists())
NO_LITTER = shutil.ignore_patterns("__pycache__", "*.egg-info")


def run(*command: str | Path, cwd: Path) -> str:
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def files_of_the_layers() -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for layer in LAYERS
        for path in (ROOT / layer).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that a build leaves nothing in the tree and finds nothing left there."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in ("src", *LAYERS):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=NO_LITTER)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", out, source, cwd=out)
    return next(out.glob("*.whl"))


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., Path]:
    """install(*what) -> the `bin` of a fresh environment that borrows our dependencies."""

    def install_into_fresh_environment(*what: str | Path) -> Path:
        environment = tmp_path / "environment"
        run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
        site_packages = next(environment.glob("lib/python*/site-packages"))
        (site_packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        command = (sys.executable, "-m", "uv", "pip", "install", "--quiet", "--offline")
        options = ("--no-deps", "--no-build-isolation", "--python", environment / "bin/python")
        run(*command, *options, *what, cwd=tmp_path)
        return environment / "bin"

    return install_into_fresh_environment


@pytest.mark.parametrize("layer", LAYERS)
def test_no_layer_is_a_package_of_its_own(layer: str) -> None:
    assert not (ROOT / layer / "__init__.py").exists()


def test_every_folder_inside_a_layer_is_a_package() -> None:
    folders = {path.parent for layer in LAYERS for path in (ROOT / layer).rglob("*/*.py")} - {
        ROOT / layer for layer in LAYERS
    }

    assert [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()] == []


def test_the_standard_librarys_platform_survives_the_repository_root() -> None:
    assert run(sys.executable, "-c", "import platform; print(platform.system())", cwd=ROOT).strip()


def test_a_wheel_holds_every_file_of_the_layers_and_nothing_else(wheel: Path) -> None:
    held = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}

    own = {"loraplex/__init__.py", "loraplex/py.typed"}
    assert held == own | {f"loraplex/{name}" for name in files_of_the_layers()}


def test_an_installed_wheel_runs_away_from_the_source(
    wheel: Path, install: Callable[..., Path], tmp_path: Path
) -> None:
    bin_folder = install(wheel)

    script = "import loraplex.engine.protocol as p; print(p.__file__)"
    assert str(tmp_path) in run(bin_folder / "python", "-c", script, cwd=tmp_path)
    assert "serve" in run(bin_folder / "loraplex", "--help", cwd=tmp_path)


def test_an_editable_install_sees_a_new_file_at_once(
    source: Path, install: Callable[..., Path], tmp_path: Path
) -> None:
    bin_folder = install("--editable", source)

    (source / "engine" / "brand_new.py").write_text("ANSWER = 42\n")
    script = "from loraplex.engine.brand_new import ANSWER; print(ANSWER)"
    answer = run(bin_folder / "python", "-c", script, cwd=tmp_path)
    (source / "engine" / "brand_new.py").unlink()

    assert answer.strip() == "42"
