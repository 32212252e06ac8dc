"""DiskFolder: the numbered folder of segments that belongs to one engine alone."""

import logging
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from loraplex.engine.kv.offload.segment import (
    BadSegment,
    OffloadIdentity,
    SegmentHeader,
    read_header,
)

_MAX_ENGINES = 64  # that share one data folder
_SUFFIX = ".kv"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoundSegment:
    path: Path
    header: SegmentHeader


class DiskFolder:
    """A folder that no other engine uses while this one lives; readable by its owner only."""

    def __init__(self, parent: Path) -> None:
        """Takes the first unused folder of `parent/0`, `parent/1`, ...

        Raises:
            OSError: there is none to be had.
        """
        self._parent = parent
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(_MAX_ENGINES):
            folder = parent / str(number)
            folder.mkdir(mode=0o700, exist_ok=True)
            folder.chmod(0o700)
            lock = FileLock(folder / "lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            self.path = folder
            self._lock = lock
            self._next = 1 + max((int(p.stem) for p in _segments(folder)), default=0)
            return
        raise OSError(f"{_MAX_ENGINES} engines use {parent} already")

    def find(self, identity: OffloadIdentity) -> list[FoundSegment]:
        """Returns what earlier engines of the same identity left, oldest first; deletes all else.

        Raises:
            OSError: the folder cannot be used.
        """
        self._take_over()
        for unfinished in self.path.glob("*.tmp"):
            unfinished.unlink()
        found = []
        for path in _segments(self.path):
            try:
                found.append(FoundSegment(path, read_header(path, identity)))
            except BadSegment as reason:
                logger.info("the disk tier ignores the file %s: %s", path.name, reason)
                path.unlink()
        return found

    def new_path(self) -> Path:
        """Returns the path of the next segment."""
        self._next += 1
        return self.path / f"{self._next - 1:012}{_SUFFIX}"

    def close(self) -> None:
        """Releases the folder to other engines."""
        self._lock.release()

    def _take_over(self) -> None:
        """Moves the content of unused folders here; elsewhere it would be outside all limits."""
        for folder in self._parent.iterdir():
            if folder == self.path or not _is_number(folder.name):
                continue
            try:
                with FileLock(folder / "lock", timeout=0):
                    for path in _segments(folder):
                        path.rename(self.new_path())
                    for unfinished in folder.glob("*.tmp"):
                        unfinished.unlink()
            except Timeout:
                continue


def _segments(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"*{_SUFFIX}") if _is_number(path.stem))


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit()  # a superscript two is a digit, and no number
