"""The tenant's namespace: a secret that outlives a restart, as KV blocks on a disk do."""

import re
import secrets
from pathlib import Path

from filelock import FileLock

from loraplex.platform.data_folder import unusable, writable_folder

_NAME = "namespace"
_FORM = re.compile(r"[0-9a-f]{32}")


def kept_namespace(home: Path) -> str:
    """Returns the namespace of a data folder, which its first start has made.

    A damaged namespace is replaced; blocks that were offloaded under it are never found again.

    Raises:
        SettingsRefused: if the folder cannot be used.
    """
    path = writable_folder(home) / _NAME
    try:
        with FileLock(home / f".{_NAME}.lock"):
            found = path.read_text(errors="replace") if path.exists() else ""
            if not _FORM.fullmatch(found):
                found = secrets.token_hex(16)
                path.touch(mode=0o600)
                path.write_text(found)
        return found
    except OSError as error:
        raise unusable(path, error) from error
