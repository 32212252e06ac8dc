"""Sockets of killed servers are swept; those of running ones stay."""

import socket
from pathlib import Path

import pytest

from loraplex.platform.engines.sockets import prepare_folder
from loraplex.platform.errors import SettingsRefused


def test_a_socket_that_nobody_listens_on_is_removed(tmp_path: Path) -> None:
    left, used = tmp_path / "engine-1.sock", tmp_path / "engine-2.sock"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(left))

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(used))
        listener.listen()
        prepare_folder(tmp_path)

    assert not left.exists()
    assert used.exists()


def test_the_folder_is_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(0o777)

    prepare_folder(folder)

    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_made_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "run").touch()

    with pytest.raises(SettingsRefused, match=r"run. cannot be used: it is no folder"):
        prepare_folder(tmp_path / "run")
