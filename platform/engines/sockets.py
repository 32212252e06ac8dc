"""The engine's socket: where it lies, and the ones that killed servers left."""

import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from loraplex.platform.data_folder import unusable, writable_folder

MAX_SOCKET_PATH = 100  # bytes; the system's limit on names of sockets


def socket_path(home: Path) -> Path:
    """In the data folder; where that has too long a name, in a folder of its own."""
    path = home / "run" / f"engine-{os.getpid()}.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return path
    return Path(tempfile.mkdtemp(prefix="loraplex-")) / "engine.sock"


def prepare_folder(folder: Path) -> None:
    """Makes the folder of sockets, closed to others, and removes those that nobody listens on.

    Raises:
        SettingsRefused: the folder cannot be used.
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
