"""AdapterFolder: an untrusted folder, whose files are opened without following links."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Self

from loraplex.adapters.errors import AdapterRejected

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_NO_LINKS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_NAMES = 1000
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


class AdapterFolder:
    """Holds the folder itself open, so that it cannot be replaced meanwhile."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator[Self]:
        """Opens the folder at `path` for the duration of the block.

        Raises:
            AdapterRejected: there is no folder there, or it is a symbolic link.
            OSError: it cannot be opened.
        """
        try:
            descriptor = os.open(path, _NO_LINKS | os.O_DIRECTORY)
        except (OSError, ValueError) as error:
            raise _refusal(error, path) from error
        try:
            yield cls(descriptor)
        finally:
            os.close(descriptor)

    def names(self) -> list[str]:
        """Returns the names in the folder, sorted; not all where there are very many."""
        with os.scandir(self._descriptor) as entries:
            return sorted(entry.name for entry in islice(entries, _MAX_NAMES))

    def has(self, path: str) -> bool:
        """Returns whether something is at a path in the folder."""
        try:
            os.stat(path, dir_fd=self._descriptor, follow_symlinks=False)
        except OSError:
            return False
        return True

    def open(self, name: str) -> BinaryIO | None:
        """Opens a file for reading; None where there is none of this name.

        Raises:
            AdapterRejected: it is a link, or no regular file, or may not be read.
        """
        try:
            # A pipe without a writer would be waited for.
            opened = os.open(name, _NO_LINKS | os.O_NONBLOCK, dir_fd=self._descriptor)
        except FileNotFoundError:
            return None
        except OSError as error:
            is_link = error.errno == errno.ELOOP
            what = "is a symbolic link; copy the file itself" if is_link else "cannot be read"
            raise AdapterRejected([f"{name} {what}"]) from error
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            os.close(opened)
            raise AdapterRejected([f"{name} is not a regular file"])
        return os.fdopen(opened, "rb")


def size_of(file: BinaryIO) -> int:
    """Returns the bytes in an open file."""
    return os.fstat(file.fileno()).st_size


def _refusal(error: OSError | ValueError, path: Path) -> Exception:
    if isinstance(error, OSError) and error.errno not in (*_GONE, errno.ELOOP):
        return error
    if os.path.islink(path):
        what = "the folder is a symbolic link; name the folder itself"
    else:
        what = "there is no such folder"
    return AdapterRejected([f"{CONFIG_NAME} is missing; {what}"])
