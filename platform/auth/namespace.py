"""The tenant's namespace: a secret that outlives a restart, as KV blocks on a disk do."""

import re
import secrets
from pathlib import Path

from filelock import FileLock

from loraplex.platform.data_folder import unusable, writable_folder

_NAME = "namespace"
_FORM = re.compile(r"[0-9a-f]{32}")


def kept_namespace(home: Path) -> str:
    """Made at the first start in a data folder, and the same from then on.

    One that is damaged is replaced: blocks that were kept under it are found by nobody then.

    Raises:
        SettingsRefused: nothing can be kept in that folder.
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
