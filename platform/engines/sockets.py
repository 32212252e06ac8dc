"""The path of the engine's socket, and the removal of sockets that killed servers left behind."""

import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from loraplex.platform.data_folder import unusable, writable_folder

MAX_SOCKET_PATH = 100  # bytes; the system limits the names of sockets


def socket_path(home: Path) -> Path:
    """Returns a path in the data folder, or in a new folder if that name is too long."""
    path = home / "run" / f"engine-{os.getpid()}.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return path
    return Path(tempfile.mkdtemp(prefix="loraplex-")) / "engine.sock"


def prepare_folder(folder: Path) -> None:
    """Makes the folder of sockets, closed to other users, and removes abandoned sockets.

    Raises:
        SettingsRefused: if the folder cannot be used.
    """
    writable_folder(folder)
    try:
        folder.chmod(0o700)
        for path in folder.glob("engine-*.sock"):
            if _is_left(path):
                path.unlink(missing_ok=True)
    except OSError as error:
        raise unusable(folder, error) from error


def _is_left(path: Path) -> bool:
    with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False
