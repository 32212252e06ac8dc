"""AdapterStore: the engine's own immutable copies of adapters, one folder per content."""

import hashlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
from filelock import FileLock

from loraplex.adapters.checks.plan import AdapterPlan
from loraplex.adapters.errors import AdapterRejected, AdapterUnavailable, listed
from loraplex.adapters.folder import CONFIG_NAME, WEIGHTS_NAME, AdapterFolder, size_of
from loraplex.adapters.manifest import MAX_CONFIG_BYTES, AdapterManifest

_PICKLE_NAME = "adapter_model.bin"
_STAGING = "staging"
_PLAN = "plan-{}.msgpack"  # of the fingerprint of the base model that it is for
_LEFT_OVER_SECONDS = 3600
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PIECE = 1 << 20  # bytes copied at a time


@dataclass(frozen=True)
class StagedAdapter:
    """A copy that is checked, and may then be published."""

    folder: Path
    weights_sha256: str


class AdapterStore:
    """Folders named by digest under one root, safe to share between processes.

    A copy is complete when it appears, and never changes afterwards. The digest is SHA-256 over the
    config fields that decide the output and the bytes of the weights file. Beside the two files lie
    the plans made by checks, one for each base model. Only the owner of the root can read its
    content.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._staging = root / _STAGING
        self._staging.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in (root, self._staging):
            folder.chmod(0o700)
        self._lock = FileLock(root / ".lock", mode=0o600)
        self._remove_left_overs()

    @contextmanager
    def stage(self, source: Path, max_bytes: int) -> Iterator[StagedAdapter]:
        """Copies a PEFT folder aside, to be checked there and then published; removed on exit.

        Args:
            source: a folder with adapter_config.json and adapter_model.safetensors.
            max_bytes: the largest weights file to accept.

        Raises:
            AdapterRejected: a file is missing, too large, a link or no regular file.
            OSError: the files cannot be copied.
        """
        folder = self._staging / uuid.uuid4().hex
        folder.mkdir(mode=0o700)
        try:
            with AdapterFolder.opened(source) as opened:
                _copy_config(opened, folder / CONFIG_NAME)
                sha256 = _copy_weights(opened, folder / WEIGHTS_NAME, max_bytes)
            yield StagedAdapter(folder, sha256)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, staged: StagedAdapter, digest: str, plan: AdapterPlan) -> None:
        """Publishes a staged copy at once and whole. A sound copy that exists already stays, a
        damaged one is replaced."""
        folder = self.root / digest
        with self._lock:
            if folder.is_dir() and not self.is_sound(digest):
                folder.rename(self._staging / uuid.uuid4().hex)  # who reads it goes on
            if not folder.is_dir():
                for path in staged.folder.iterdir():
                    _flush_read_only(path)
                staged.folder.rename(folder)
        self.keep_plan(digest, plan)

    def is_sound(self, digest: str) -> bool:
        """Returns whether a published copy still is what its digest says."""
        folder = self.folder(digest)
        try:
            with (folder / WEIGHTS_NAME).open("rb") as file:
                weights_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            fingerprint = AdapterManifest.from_json((folder / CONFIG_NAME).read_bytes()).fingerprint
        except (OSError, AdapterRejected):
            return False
        return digest_of(fingerprint, weights_sha256) == digest

    @contextmanager
    def open_weights(self, digest: str) -> Iterator[BinaryIO]:
        """Opens the weights file of a copy.

        Raises:
            AdapterRejected: the digest is none.
            AdapterUnavailable: the copy is gone or cannot be read.
        """
        path = self.folder(digest)
        try:
            with AdapterFolder.opened(path) as folder:
                file = folder.open(WEIGHTS_NAME)
        except (AdapterRejected, OSError) as error:
            raise AdapterUnavailable("the stored copy of the adapter cannot be read") from error
        if file is None:
            raise AdapterUnavailable("the stored copy of the adapter cannot be read")
        with file:
            yield file

    def folder(self, digest: str) -> Path:
        """Returns the folder of a copy, if there is one. Raises AdapterRejected where the digest is
        malformed."""
        if _DIGEST.fullmatch(digest) is None:
            raise AdapterRejected(["the digest of an adapter has 64 hexadecimal digits"])
        return self.root / digest

    def plan(self, digest: str, base: str) -> AdapterPlan | None:
        """Returns the plan made for a base model's fingerprint; None where there is none, or it is
        damaged."""
        return _read_plan(self.folder(digest) / _PLAN.format(base[:16]), base)

    def keep_plan(self, digest: str, plan: AdapterPlan) -> None:
        """Stores a plan beside its copy. Where that fails, the check is made again next time."""
        path = self.folder(digest) / _PLAN.format(plan.base[:16])
        draft = path.with_name(uuid.uuid4().hex)
        data = msgspec.msgpack.encode(plan)
        with suppress(OSError):
            if not path.exists():
                with _created(draft) as file:
                    file.write(hashlib.sha256(data).digest() + data)
                draft.rename(path)

    def plans(self, base: str, limit: int) -> list[AdapterPlan]:
        """Returns plans for a base model's fingerprint, of at most `limit` copies, the latest
        first."""
        found = []
        for path in self.root.glob(f"*/{_PLAN.format(base[:16])}"):
            with suppress(OSError):
                found.append((path.stat().st_mtime, path))
        plans = (_read_plan(path, base) for _, path in sorted(found, reverse=True)[:limit])
        return [plan for plan in plans if plan is not None]

    def _remove_left_overs(self) -> None:
        oldest = time.time() - _LEFT_OVER_SECONDS
        for folder in self._staging.iterdir():
            with suppress(FileNotFoundError):  # another store has just published or removed it
                if folder.stat().st_mtime < oldest:
                    shutil.rmtree(folder, ignore_errors=True)


def digest_of(fingerprint: str, weights_sha256: str) -> str:
    """Returns the name of an adapter's copy, from its manifest's fingerprint and its weights."""
    text = f"loraplex adapter 1\n{fingerprint}\n{weights_sha256}\n"
    return hashlib.sha256(text.encode()).hexdigest()


def _read_plan(path: Path, base: str) -> AdapterPlan | None:
    try:
        raw = path.read_bytes()
        if hashlib.sha256(raw[32:]).digest() != raw[:32]:
            return None
        plan = msgspec.msgpack.decode(raw[32:], type=AdapterPlan)
    except (OSError, msgspec.DecodeError):
        return None
    return plan if plan.base == base else None


def _copy_config(source: AdapterFolder, target: Path) -> None:
    file = source.open(CONFIG_NAME)
    if file is None:
        raise AdapterRejected([_missing_config(source)])
    with file, _created(target) as copy:
        if size_of(file) > MAX_CONFIG_BYTES:
            raise AdapterRejected([f"{CONFIG_NAME} is larger than {MAX_CONFIG_BYTES} bytes"])
        copy.write(file.read(MAX_CONFIG_BYTES + 1))


def _missing_config(source: AdapterFolder) -> str:
    deeper = [name for name in source.names() if source.has(f"{name}/{CONFIG_NAME}")]
    hint = f"; there is one in the folder {listed(deeper)} below" if deeper else ""
    return f"{CONFIG_NAME} is missing{hint}"


def _copy_weights(source: AdapterFolder, target: Path, max_bytes: int) -> str:
    """Copies the weights; returns the SHA-256 of what was copied."""
    file = source.open(WEIGHTS_NAME)
    if file is None:
        raise AdapterRejected([_missing_weights(source)])
    limit = f"{max_bytes} bytes that an adapter of this base model can have at most"
    with file, _created(target) as copy:
        size = size_of(file)
        if size > max_bytes:
            raise AdapterRejected([f"{WEIGHTS_NAME} has {size} bytes, more than the {limit}"])
        sha256, left = hashlib.sha256(), max_bytes  # it may grow while it is copied
        while piece := file.read(min(_PIECE, left)):
            sha256.update(piece)
            copy.write(piece)
            left -= len(piece)
    return sha256.hexdigest()


def _missing_weights(source: AdapterFolder) -> str:
    names = source.names()
    if _PICKLE_NAME in names:
        return f"{_PICKLE_NAME} is a pickle and is never opened; save the adapter as {WEIGHTS_NAME}"
    if any(name.startswith("adapter_model") and ".safetensors" in name for name in names):
        return f"{WEIGHTS_NAME} is missing; weights in several files are not supported"
    return f"{WEIGHTS_NAME} is missing"


@contextmanager
def _created(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file for writing that only its owner can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        yield file


def _flush_read_only(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    path.chmod(0o400)
