"""AdapterStore: the engine's own, immutable copies of adapters, one folder per content."""

import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from loraplex.adapters.errors import AdapterRejected, AdapterUnavailable, listed
from loraplex.adapters.manifest import MAX_CONFIG_BYTES, AdapterManifest

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_PICKLE_NAME = "adapter_model.bin"
_STAGING = "staging"
_LEFT_OVER_SECONDS = 3600


@dataclass(frozen=True)
class StoredAdapter:
    """A copy in the store, or one that is about to be published there."""

    digest: str
    manifest: AdapterManifest
    folder: Path

    @property
    def weights_path(self) -> Path:
        return self.folder / WEIGHTS_NAME


class AdapterStore:
    """Folders named by digest under one root, safe to share between processes.

    A copy is complete when it appears, and never changes after that; the folder that it came from
    is not needed again. The digest is SHA-256 over the config fields that decide the output and the
    bytes of the weights file.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._staging = root / _STAGING
        self._staging.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(root / ".lock")
        self._remove_left_overs()

    @contextmanager
    def stage(self, source: Path, max_bytes: int) -> Iterator[StoredAdapter]:
        """Copies a PEFT folder aside, to be judged there and then published; removed on exit.

        Args:
            source: a folder with adapter_config.json and adapter_model.safetensors.
            max_bytes: the largest weights file to accept.

        Raises:
            AdapterRejected: a file is missing, too large or not a regular file, or the config is
                not acceptable.
            OSError: the files cannot be copied.
        """
        config = _read_config(source)
        manifest = AdapterManifest.from_json(config)
        folder = self._staging / uuid.uuid4().hex
        folder.mkdir()
        try:
            weights_digest = _copy_weights(source, folder / WEIGHTS_NAME, max_bytes)
            (folder / CONFIG_NAME).write_bytes(config)
            yield StoredAdapter(_digest(manifest, weights_digest), manifest, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, staged: StoredAdapter) -> StoredAdapter:
        """Makes a staged copy appear at once and whole. A copy that is there already stays."""
        folder = self.root / staged.digest
        with self._lock:
            if not folder.is_dir():
                for path in staged.folder.iterdir():
                    _flush_read_only(path)
                staged.folder.rename(folder)
        return StoredAdapter(staged.digest, staged.manifest, folder)

    def manifests(self, limit: int) -> list[AdapterManifest]:
        """Of the copies that were published last, at most `limit`; damaged ones are left out."""
        paths = [(path.stat().st_mtime, path) for path in self.root.glob(f"*/{CONFIG_NAME}")]
        found = []
        for _, path in sorted(paths, reverse=True)[:limit]:
            with suppress(AdapterRejected, OSError):
                found.append(AdapterManifest.from_json(path.read_bytes()))
        return found

    def verify(self, stored: StoredAdapter) -> None:
        """Reads a copy again and compares it with its digest.

        Raises:
            AdapterUnavailable: the copy is gone or damaged.
        """
        try:
            weights_digest = _hash(stored.weights_path)
        except OSError as error:
            raise AdapterUnavailable("the stored copy of the adapter cannot be read") from error
        if _digest(stored.manifest, weights_digest) != stored.digest:
            raise AdapterUnavailable("the stored copy of the adapter is damaged")

    def _remove_left_overs(self) -> None:
        oldest = time.time() - _LEFT_OVER_SECONDS
        for folder in self._staging.iterdir():
            with suppress(FileNotFoundError):  # another store has just published or removed it
                if folder.stat().st_mtime < oldest:
                    shutil.rmtree(folder, ignore_errors=True)


def _read_config(source: Path) -> bytes:
    path = source / CONFIG_NAME
    if not os.path.isfile(path):  # unlike Path's, false for a name that cannot exist
        raise AdapterRejected([_missing_config(source)])
    try:
        with path.open("rb") as file:
            return file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise AdapterRejected([f"{CONFIG_NAME} cannot be read"]) from error


def _missing_config(source: Path) -> str:
    if not os.path.isdir(source):
        return f"{CONFIG_NAME} is missing; there is no such folder"
    deeper = sorted(path.parent.name for path in source.glob(f"*/{CONFIG_NAME}"))
    hint = f"; there is one in the folder {listed(deeper)} below" if deeper else ""
    return f"{CONFIG_NAME} is missing{hint}"


def _copy_weights(source: Path, target: Path, max_bytes: int) -> str:
    path = source / WEIGHTS_NAME
    if not os.path.isfile(path):
        raise AdapterRejected([_missing_weights(source)])
    size = path.stat().st_size
    if size > max_bytes:
        limit = f"{max_bytes} bytes that an adapter of this base model can have at most"
        raise AdapterRejected([f"{WEIGHTS_NAME} has {size} bytes, more than the {limit}"])
    shutil.copyfile(path, target)
    return _hash(target)


def _missing_weights(source: Path) -> str:
    if (source / _PICKLE_NAME).exists():
        return f"{_PICKLE_NAME} is a pickle and is never opened; save the adapter as {WEIGHTS_NAME}"
    shards = sorted(path.name for path in source.glob("adapter_model*.safetensors*"))
    if shards:
        return f"{WEIGHTS_NAME} is missing; weights in several files are not supported"
    return f"{WEIGHTS_NAME} is missing"


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(manifest: AdapterManifest, weights_digest: str) -> str:
    text = f"loraplex adapter 1\n{manifest.fingerprint}\n{weights_digest}\n"
    return hashlib.sha256(text.encode()).hexdigest()


def _flush_read_only(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    path.chmod(0o444)
