"""DiskTier: KV blocks in files, written and read on other threads."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from loraplex.engine.kv.offload.disk_folder import DiskFolder
from loraplex.engine.kv.offload.fair_lru import FairLRU
from loraplex.engine.kv.offload.segment import (
    OffloadIdentity,
    Record,
    read_records,
    record_bytes,
    segment_bytes,
    write_segment,
)
from loraplex.engine.kv.tiers import BlockKey

SEGMENT_BYTES = 4 << 20  # a file is written once so much has come together
QUEUE_BYTES = 64 << 20  # of blocks that are not written yet; more are not taken
KEY_BYTES = 48  # that a block takes in a file's header, at most
FILLING = 0.9  # of the limit that blocks and their keys can take, whatever files they are in
MAX_AGE = 1.0  # seconds until what has come together is written, however little it is

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Segment:
    """Blocks of one account that are written, read and deleted together."""

    path: Path
    account: str
    keys: list[BlockKey]
    num_bytes: int


@dataclass(eq=False)
class _Gathering:
    """Blocks of one account that will become a segment."""

    since: float
    records: list[Record] = field(default_factory=list)


@dataclass(frozen=True)
class _Writing:
    records: list[Record]
    segment: _Segment
    done: Future[None]


_Place = Record | tuple[_Segment, int]  # in memory until it is written; then its place in a file


class DiskTier:
    """The disk tier; used by the engine's thread only, which never waits for the disk.

    The account with most bytes on disk loses its least recently used file first. An error of the
    disk turns the tier off for good: it forgets everything, with one warning, and accepts no more
    blocks.
    """

    def __init__(
        self,
        parent: Path,
        limit_bytes: int,
        identity: OffloadIdentity,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reopens what an earlier engine of the same identity left in `parent`."""
        self.num_written_bytes = 0
        self.num_read_bytes = 0
        self.num_discarded = 0  # blocks that were damaged
        self.num_dropped = 0  # accepted blocks for which no room could be made afterwards
        self._limit = limit_bytes
        self._identity = identity
        self._clock = clock
        self._index: dict[BlockKey, _Place] = {}
        self._order: FairLRU[_Segment] = FairLRU(clock)
        self._gathering: dict[str, _Gathering] = {}
        self._writing: list[_Writing] = []
        self._deleting: list[Future[None]] = []
        self._num_bytes = 0
        self._num_queued_bytes = 0
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload-write")
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload-read")
        self._folder: DiskFolder | None = None
        self._is_broken = False
        try:
            self._folder = DiskFolder(parent)
            self._restore(self._folder)
        except OSError as error:
            self._turn_off(error)

    @property
    def is_on(self) -> bool:
        return self._folder is not None

    @property
    def folder(self) -> Path:
        """Returns the folder of the files, while the tier is on."""
        if self._folder is None:
            raise RuntimeError("the disk tier is off")
        return self._folder.path

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all files."""
        return self._num_bytes

    @property
    def usage(self) -> dict[str, int]:
        """Returns each account's bytes in files."""
        return self._order.usage

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._index

    @property
    def max_blocks(self) -> int:
        """Returns how many blocks fit at the same time, in a few files or many."""
        return int(FILLING * self._limit) // (record_bytes(self._identity) + KEY_BYTES)

    def touch(self, key: BlockKey) -> None:
        """Counts the file of a block as used now."""
        place = self._index.get(key)
        if place is not None and not isinstance(place, Record):
            self._order.touch(place[0])

    def put(self, account: str, record: Record) -> bool:
        """Accepts a block to be written soon; False if too many are queued or the tier is off."""
        size = record_bytes(self._identity)
        if self._folder is None or self._num_queued_bytes + size > min(QUEUE_BYTES, self._limit):
            return False
        gathering = self._gathering.setdefault(account, _Gathering(self._clock()))
        gathering.records.append(record)
        self._index[record.key] = record
        self._num_queued_bytes += size
        if len(gathering.records) * size >= min(SEGMENT_BYTES, self._limit // 2):
            self._write(account, self._folder)
        return True

    def read(self, keys: list[BlockKey]) -> Future[list[Record | None]]:
        """Starts to read blocks: a record for each key, None for one that is damaged or gone. Pass
        the result to `judge`."""
        places = [self._index[key] for key in keys]
        for key in keys:
            self.touch(key)
        return self._reader.submit(_read, places, keys, self._identity)

    def judge(self, keys: list[BlockKey], done: Future[list[Record | None]]) -> list[Record | None]:
        """Returns the outcome of a finished read; damaged blocks are forgotten."""
        error = done.exception()
        if error is not None:
            self._turn_off(error)
            return [None] * len(keys)
        records = done.result()
        for key, record in zip(keys, records, strict=True):
            if record is not None:
                self.num_read_bytes += len(record.content)
            elif self._index.pop(key, None) is not None:
                self.num_discarded += 1
        return records

    def collect(self) -> None:
        """Applies what the threads have done since, and starts what is due. Call it often."""
        for writing in [writing for writing in self._writing if writing.done.done()]:
            self._writing.remove(writing)
            self._finish(writing)
        for deleted in [deleted for deleted in self._deleting if deleted.done()]:
            self._deleting.remove(deleted)
            if (error := deleted.exception()) is not None:
                self._turn_off(error)
        if self._folder is not None:
            now = self._clock()
            for account, gathering in list(self._gathering.items()):
                if now - gathering.since >= MAX_AGE:
                    self._write(account, self._folder)

    def flush(self) -> None:
        """Writes the gathered blocks, and returns when that is done."""
        if self._folder is not None:
            for account in list(self._gathering):
                self._write(account, self._folder)
        wait([writing.done for writing in self._writing])
        self.collect()

    def close(self) -> None:
        """Writes the remaining blocks, and releases the folder to other engines."""
        self.flush()
        self._writer.shutdown()
        self._reader.shutdown(cancel_futures=True)
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def check_integrity(self) -> None:
        """Proves that the sums agree with the files and the queue, in the time of the accounts.

        Raises:
            RuntimeError: they do not.
        """
        size = record_bytes(self._identity)
        queued = sum(len(g.records) for g in self._gathering.values())
        queued += sum(len(writing.records) for writing in self._writing)
        if queued * size != self._num_queued_bytes:
            raise RuntimeError("the disk tier has lost count of its queue")
        if sum(self._order.usage.values()) != self._num_bytes or self._num_bytes > self._limit:
            raise RuntimeError("the disk tier has lost count of its files")

    def _restore(self, folder: DiskFolder) -> None:
        for found in folder.find(self._identity):
            size, header = found.path.stat().st_size, found.header
            segment = _Segment(found.path, header.account, header.keys, size)
            if self._make_room(segment):
                self._take_in(segment)
            else:
                self._delete(segment)

    def _write(self, account: str, folder: DiskFolder) -> None:
        """Queues a file for the writing thread, behind the deletions that it needs, so that the
        limit holds at every moment."""
        records = self._gathering.pop(account).records
        keys = [record.key for record in records]
        size = segment_bytes(self._identity, account, keys)
        segment = _Segment(folder.new_path(), account, keys, size)
        if self._make_room(segment):
            done = self._writer.submit(
                write_segment, segment.path, self._identity, account, records
            )
            self._writing.append(_Writing(records, segment, done))
        else:
            self.num_dropped += len(records)
            self._unqueue(records)
            for record in records:
                self._forget(record.key, record)

    def _make_room(self, segment: _Segment) -> bool:
        """Counts a file, pinned until `_take_in`, and deletes others until the limit holds; False,
        without counting the file, where too few can be deleted."""
        self._order.add(segment, segment.account, segment.num_bytes)
        self._order.pin(segment)
        self._num_bytes += segment.num_bytes
        while self._num_bytes > self._limit:
            victim = self._order.victim(segment.account)
            if victim is None:
                self._order.discard(segment)
                self._num_bytes -= segment.num_bytes
                return False
            self._drop(victim)
        return True

    def _finish(self, writing: _Writing) -> None:
        self._unqueue(writing.records)
        error = writing.done.exception()
        if error is not None:
            self._turn_off(error)
        elif self._folder is not None:
            self.num_written_bytes += writing.segment.num_bytes
            self._take_in(writing.segment)

    def _take_in(self, segment: _Segment) -> None:
        """Indexes the blocks of a written file."""
        for place, key in enumerate(segment.keys):
            known = self._index.get(key)
            if known is None or isinstance(known, Record):
                self._index[key] = (segment, place)
        self._order.unpin(segment)

    def _drop(self, segment: _Segment) -> None:
        for place, key in enumerate(segment.keys):
            self._forget(key, (segment, place))
        self._order.discard(segment)
        self._num_bytes -= segment.num_bytes
        self._delete(segment)

    def _delete(self, segment: _Segment) -> None:
        self._deleting.append(self._writer.submit(segment.path.unlink, missing_ok=True))

    def _forget(self, key: BlockKey, place: _Place) -> None:
        """Forgets that a block is at this place; it may be at another."""
        if self._index.get(key) == place:
            del self._index[key]

    def _unqueue(self, records: list[Record]) -> None:
        self._num_queued_bytes -= len(records) * record_bytes(self._identity)

    def _turn_off(self, error: BaseException) -> None:
        if self._is_broken:
            return
        self._is_broken = True
        logger.warning("the disk tier is off until the next start: %s", error)
        if self._folder is not None:
            self._folder.close()
        self._folder = None
        self._index.clear()
        self._gathering.clear()
        self._order, self._num_bytes = FairLRU(self._clock), 0
        self._num_queued_bytes = sum(len(w.records) for w in self._writing) * record_bytes(
            self._identity
        )


def _read(
    places: list[_Place], keys: list[BlockKey], identity: OffloadIdentity
) -> list[Record | None]:
    """Returns each place's record; each file is opened once."""
    found: dict[BlockKey, Record | None] = {}
    by_segment: dict[_Segment, list[tuple[int, BlockKey]]] = {}
    for place, key in zip(places, keys, strict=True):
        if isinstance(place, Record):
            found[key] = place
        else:
            by_segment.setdefault(place[0], []).append((place[1], key))
    for segment, wanted in by_segment.items():
        wanted.sort()
        try:
            records = list(read_records(segment.path, identity, wanted))
        except FileNotFoundError:  # it was deleted meanwhile, to keep the limit
            continue
        found |= {key: record for (_, key), record in zip(wanted, records, strict=True)}
    return [found.get(key) for key in keys]
