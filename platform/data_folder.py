"""The folders of the server's data: made where there are none, and proved to be writable."""

import tempfile
from pathlib import Path

from loraplex.platform.errors import SettingsRefused


def writable_folder(path: Path) -> Path:
    """Returns the folder; a new one is closed to other users.

    Raises:
        SettingsRefused: if nothing can be written there.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path, buffering=0) as probe:
            probe.write(b"\0")  # which a full disk or quota does not take
    except OSError as error:
        raise unusable(path, error) from error
    return path


def unusable(path: Path, error: OSError) -> SettingsRefused:
    reason = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
    return SettingsRefused([f"LORAPLEX_HOME: {str(path)!r} cannot be used: {reason}"])
