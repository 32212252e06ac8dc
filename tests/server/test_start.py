"""A start that cannot work ends with one clear line for each fault, and no trace."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.server import LORAPLEX, Server, running_server

from loraplex.platform.cli import OPTIONS

pytestmark = pytest.mark.server


def refused(home: Path, *options: str) -> tuple[int, str]:
    """The exit status and the log of a server that must not start."""
    server = Server(home, *options)
    status = server.wait_exit()
    log = "".join(server.log)
    assert server.output == []
    assert "Traceback" not in log
    return status, log


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_bad_settings_are_all_named_at_once(tmp_path: Path) -> None:
    status, log = refused(
        tmp_path,
        "--model=nowhere",
        "--port=99999",
        "--dtype=int4",
        "--kv-cache-memory=lots",
        "--served-model-name=a b",
        "--max-num-seqs=0",
    )

    assert status == 2
    lines = log.strip().splitlines()
    named = ("model", "served-model-name", "port", "dtype", "max-num-seqs", "kv-cache-memory")
    assert len(lines) == len(named)
    assert all(f"--{name} (LORAPLEX_" in log for name in named)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--model (LORAPLEX_MODEL): must be given"),
        (["--adapter=red"], "--adapter takes NAME=FOLDER, got 'red'"),
        (["--adapter=a=x", "--adapter=a=y"], "--adapter a is given 2 times"),
        (["--max-num-seqs=9", "--max-num-batched-tokens=8"], "at least max_num_seqs (9)"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path, model_folder: Path, options: list[str], said: str
) -> None:
    model = [f"--model={model_folder}"] if options else []

    status, log = refused(tmp_path, *model, *options)

    assert status == 2
    assert said in log


def test_a_taken_port_is_told_before_anything_is_loaded(
    tmp_path: Path, model_folder: Path, taken_port: int
) -> None:
    status, log = refused(tmp_path, f"--model={model_folder}", f"--port={taken_port}")

    assert status == 1
    assert (
        log == f"loraplex: Cannot listen on 127.0.0.1 port {taken_port}: Address already in use\n"
    )


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    status, log = refused(tmp_path, f"--model={tmp_path / 'empty'}")

    assert status == 2
    assert "no Hugging Face checkpoint: it has no config.json" in log


def test_a_cache_that_is_too_small_is_refused_with_the_arithmetic(
    tmp_path: Path, model_folder: Path
) -> None:
    status, log = refused(tmp_path, f"--model={model_folder}", "--kv-cache-memory=100KB")

    assert status == 1
    assert "2048" in log.replace(",", "")


def test_every_fault_of_every_adapter_is_named(
    tmp_path: Path, model_folder: Path, adapters: dict[str, Path]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(adapters["red"], broken)
    config = json.loads((broken / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    (tmp_path / "empty").mkdir()

    status, log = refused(
        tmp_path,
        f"--model={model_folder}",
        "--kv-cache-memory=32MiB",
        f"--adapter=red={adapters['red']}",
        f"--adapter=broken={broken}",
        f"--adapter=empty={tmp_path / 'empty'}",
        f"--adapter=base={adapters['red']}",
    )

    assert status == 1
    assert "Adapter broken" in log
    assert "use_dora" in log
    assert "Adapter empty" in log
    assert "Adapter base: There is a model 'base' already." in log
    assert "Adapter red" not in log


@pytest.fixture(scope="module")
def lenient(
    model_folder: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path]]:
    """A server that was started with a broken adapter and without any umask, and its home."""
    folder = tmp_path_factory.mktemp("lenient")
    broken = shutil.copytree(adapters["red"], folder / "broken")
    config = json.loads((broken / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    options = [
        f"--model={model_folder}",
        "--kv-cache-memory=32MiB",
        "--num-threads=1",
        "--offload-memory=8MiB",
        "--offload-disk=8MiB",
        "--strict-adapters=false",
        f"--adapter=red={adapters['red']}",
        f"--adapter=broken={broken}",
    ]
    umask = os.umask(0)
    try:
        with running_server(folder / "home", *options) as server:
            yield server, folder / "home"
    finally:
        os.umask(umask)


def test_a_refused_adapter_need_not_end_the_start(lenient: tuple[Server, Path]) -> None:
    server, _ = lenient
    body = {"prompt": "Hello", "max_tokens": 2}

    with server.http() as http:
        cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
        served = http.post("/v1/completions", json={**body, "model": "red"})
        failed = http.post("/v1/completions", json={**body, "model": "broken"})

    assert served.status_code == 200
    assert (cards["red"]["fault"], cards["base"]["fault"]) == (None, None)
    assert "use_dora" in cards["broken"]["fault"]
    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "adapter_unavailable")
    assert "use_dora" in failed.json()["error"]["message"]
    assert "The adapter broken of tenant default cannot be served" in "".join(server.log)


def test_whatever_the_umask_nobody_else_can_read_the_data(lenient: tuple[Server, Path]) -> None:
    _, home = lenient
    paths = [home, *home.rglob("*")]

    kinds = {path.name for path in home.iterdir()}
    assert kinds >= {"adapters", "run", "namespace", "offload"}
    assert {str(path) for path in paths if path.stat().st_mode & 0o077} == set()


@pytest.mark.parametrize("name", ["", "run", "namespace", "adapters"])
def test_a_home_that_cannot_be_used_is_told_in_one_sentence(
    tmp_path: Path, model_folder: Path, name: str
) -> None:
    home = tmp_path / "home"
    if name:
        home.mkdir()
    if name == "namespace":
        (home / name).mkdir()
    else:
        (home / name).write_text("in the way")

    status, log = refused(
        home,
        f"--model={model_folder}",
    )

    assert status == 2
    assert log.startswith(f"loraplex: LORAPLEX_HOME: '{home / name}' cannot be used: ")
    assert log.count("\n") == 1


def test_a_server_that_is_stopped_while_it_loads_ends_clean(
    tmp_path: Path, model_folder: Path
) -> None:
    server = Server(tmp_path, f"--model={model_folder}")
    engine = server.engine()

    status = server.stop()

    assert status == 0
    assert server.output == []
    assert not engine.is_running()
    assert not list((tmp_path / "run").iterdir())


def test_an_engine_does_not_outlive_a_killed_server(tmp_path: Path, model_folder: Path) -> None:
    server = Server(tmp_path, f"--model={model_folder}")
    engine = server.engine()

    server.kill()

    engine.wait(timeout=60)


def test_help_explains_every_option_with_its_default() -> None:
    text = subprocess.run(
        [LORAPLEX, "serve", "--help"], capture_output=True, text=True, check=True
    ).stdout

    options = [line for line in text.splitlines() if line.startswith("  --")]
    assert len(options) == len(OPTIONS) + 1  # --help
    assert " ".join(text.split()).count("[default: ") == len(options) - 2  # --model and --help


def test_capacity_is_told_without_a_server(model_folder: Path) -> None:
    done = subprocess.run(
        [LORAPLEX, "capacity", str(model_folder), "--kv-cache-memory", "33554432"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0
    assert "bytes per token" in done.stdout


def test_a_stop_of_the_whole_process_group_during_the_start_leaves_nothing(
    tmp_path: Path, model_folder: Path
) -> None:
    command = [LORAPLEX, "serve", f"--model={model_folder}", "--port=0"]
    environment = os.environ | {"LORAPLEX_HOME": str(tmp_path)}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, env=environment, start_new_session=True, text=True
    ) as server:
        while not (children := psutil.Process(server.pid).children()):
            time.sleep(0.01)
        os.killpg(server.pid, signal.SIGTERM)
        _, log = server.communicate(timeout=60)

    assert (server.returncode, "Traceback" in log) == (0, False)
    assert not any(child.is_running() for child in children)
