"""Segments: files of KV blocks on disk, of which nothing is trusted unchecked.

A segment is a magic number with the format's version, the length and the digest of a header, the
header in msgpack, and then one record after another, all of one length: the digest of the whole
record, the block's token ids, and its content. A record's digest covers its key, too, so a record
in another's place is as bad as a flipped bit.
"""

import hashlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from loraplex.engine.kv.tiers import BlockKey

MAGIC = b"LPXKV\x00\x00\x01"  # the last byte is the version of the format
_DIGEST = 16  # bytes of a SHA-256, which many CPUs compute in hardware
_PREFIX = struct.Struct(f"<{len(MAGIC)}sQ{_DIGEST}s")
_MAX_HEADER = 1 << 28  # bytes


class OffloadIdentity(msgspec.Struct, frozen=True):
    """What blocks must have in common to be interchangeable between engines."""

    kv_format: str  # these four: as in a `BlockKeyScope`
    model_revision: str
    quantization: str
    numerics: str
    layout: str  # which layers a block of each group holds, and where
    block_size: int  # tokens
    block_bytes: int


class SegmentHeader(msgspec.Struct, frozen=True):
    identity: OffloadIdentity
    account: str  # that pays for the blocks
    keys: list[BlockKey]  # of the records, in their order


@dataclass(frozen=True)
class Record:
    key: BlockKey
    token_ids: tuple[int, ...]
    content: bytes | memoryview  # of all layers of its group


class BadSegment(Exception):
    """Raised for a file that is not, or no longer, a segment of ours; the message says why."""


def write_segment(
    path: Path, identity: OffloadIdentity, account: str, records: list[Record]
) -> None:
    """Writes a file that exists whole or not at all. It is not forced to the disk: damage from a
    crash is found when it is read.

    Raises:
        OSError: it cannot be written; nothing stays behind.
    """
    header = _header(identity, account, [record.key for record in records])
    unfinished = path.with_suffix(".tmp")
    try:
        with unfinished.open("wb") as file:
            file.write(_PREFIX.pack(MAGIC, len(header), _digest(header)))
            file.write(header)
            for record in records:
                tokens = _packed(record.token_ids)
                file.write(_digest_of(record.key, tokens, record.content))
                file.write(tokens)
                file.write(record.content)
        unfinished.rename(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def segment_bytes(identity: OffloadIdentity, account: str, keys: list[BlockKey]) -> int:
    """Returns the length of a file of these blocks."""
    header = _header(identity, account, keys)
    return _PREFIX.size + len(header) + len(keys) * record_bytes(identity)


def read_header(path: Path, identity: OffloadIdentity) -> SegmentHeader:
    """Returns the header of a segment of this very identity, whose length fits.

    Raises:
        BadSegment: it is none.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        prefix = file.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size:
            raise BadSegment("it is too short")
        magic, length, digest = _PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise BadSegment("it is of another format")
        encoded = file.read(min(length, _MAX_HEADER))
        size = os.fstat(file.fileno()).st_size
    if _digest(encoded) != digest:
        raise BadSegment("its header is damaged")
    try:
        header = msgspec.msgpack.decode(encoded, type=SegmentHeader)
    except msgspec.DecodeError as error:
        raise BadSegment("its header cannot be read") from error
    if header.identity != identity:
        raise BadSegment("it is of another model or layout")
    if size != _PREFIX.size + length + len(header.keys) * record_bytes(identity):
        raise BadSegment("it has another length than its header says")
    return header


def read_records(
    path: Path, identity: OffloadIdentity, wanted: list[tuple[int, BlockKey]]
) -> Iterator[Record | None]:
    """Returns the records at these places where they are the blocks with these keys; None for every
    other one, whatever is wrong with it.

    Raises:
        OSError: the file cannot be read.
    """
    size = record_bytes(identity)
    with path.open("rb") as file:
        prefix = file.read(_PREFIX.size)
        length = _PREFIX.unpack(prefix)[1] if len(prefix) == _PREFIX.size else 0
        start = _PREFIX.size + min(length, _MAX_HEADER)
        for place, key in wanted:
            yield _parse(os.pread(file.fileno(), size, start + place * size), identity, key)


def record_bytes(identity: OffloadIdentity) -> int:
    return _DIGEST + 4 * identity.block_size + identity.block_bytes


def _header(identity: OffloadIdentity, account: str, keys: list[BlockKey]) -> bytes:
    return msgspec.msgpack.encode(SegmentHeader(identity, account, keys))


def _parse(record: bytes, identity: OffloadIdentity, key: BlockKey) -> Record | None:
    if len(record) != record_bytes(identity):
        return None
    view = memoryview(record)
    end = _DIGEST + 4 * identity.block_size
    digest, tokens, content = view[:_DIGEST], view[_DIGEST:end], view[end:]
    if digest != _digest_of(key, tokens, content):
        return None
    token_ids = tuple(np.frombuffer(tokens, "<u4").tolist())
    return Record(key, token_ids, content)


def _digest_of(key: BlockKey, tokens: bytes | memoryview, content: bytes | memoryview) -> bytes:
    group, content_key = key
    digest = hashlib.sha256(struct.pack("<QQ", group, len(content_key)))
    for part in (content_key, tokens, content):
        digest.update(part)
    return digest.digest()[:_DIGEST]


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_DIGEST]


def _packed(token_ids: tuple[int, ...]) -> bytes:
    return np.asarray(token_ids, dtype="<u4").tobytes()
