"""A segment gives back what was written, or nothing."""

from pathlib import Path

import msgspec
import pytest
from support.engine.offload import IDENTITY, key_of, record_of

from loraplex.engine.kv.offload.segment import (
    BadSegment,
    Record,
    read_header,
    read_records,
    write_segment,
)
from loraplex.engine.kv.tiers import BlockKey

RECORDS = [record_of(number) for number in (1, 2, 3)]
WANTED = [(place, record.key) for place, record in enumerate(RECORDS)]


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    path = tmp_path / "1.kv"
    write_segment(path, IDENTITY, "tenant", RECORDS)
    return path


def served(path: Path) -> list[Record | None]:
    """What an engine that starts would serve from a file."""
    try:
        keys = read_header(path, IDENTITY).keys
    except BadSegment:
        return []
    return list(read_records(path, IDENTITY, list(enumerate(keys))))


def test_what_was_written_is_read(segment: Path) -> None:
    header = read_header(segment, IDENTITY)

    assert (header.account, header.keys) == ("tenant", [record.key for record in RECORDS])
    assert list(read_records(segment, IDENTITY, WANTED)) == RECORDS


def test_a_flipped_bit_anywhere_is_never_served(segment: Path) -> None:
    whole = segment.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        segment.write_bytes(damaged)

        found = served(segment)

        assert len([r for r in found if r in RECORDS]) < len(RECORDS), place
        assert all(record in RECORDS for record in found if record is not None), place


def test_a_flipped_bit_below_an_index_that_is_in_memory_is_never_served(segment: Path) -> None:
    whole = segment.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        segment.write_bytes(damaged)

        found = list(read_records(segment, IDENTITY, WANTED))

        assert all(record in (None, good) for record, good in zip(found, RECORDS, strict=True)), (
            place
        )


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused(segment: Path, share: float) -> None:
    whole = segment.read_bytes()
    segment.write_bytes(whole[: int(share * len(whole))])

    with pytest.raises(BadSegment):
        read_header(segment, IDENTITY)


def test_a_file_truncated_while_it_is_in_use_gives_what_is_whole(segment: Path) -> None:
    segment.write_bytes(segment.read_bytes()[:-1])

    assert list(read_records(segment, IDENTITY, WANTED)) == [*RECORDS[:-1], None]


@pytest.mark.parametrize(
    "change",
    [
        {"kv_format": "bfloat16"},
        {"model_revision": "2"},
        {"quantization": "int8"},
        {"numerics": "2"},
        {"layout": "two groups"},
        {"block_size": 8},
        {"block_bytes": 128},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_engines_segment_is_refused(segment: Path, change: dict[str, str | int]) -> None:
    other = msgspec.structs.replace(IDENTITY, **change)

    with pytest.raises(BadSegment, match="another model or layout"):
        read_header(segment, other)


@pytest.mark.parametrize(
    "other", [key_of(3), (0, key_of(1)[1])], ids=["another block's", "another group's"]
)
def test_a_record_does_not_pass_for_another_key(segment: Path, other: BlockKey) -> None:
    assert list(read_records(segment, IDENTITY, [(0, other), (0, key_of(1))])) == [None, RECORDS[0]]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "1.kv").mkdir()

    with pytest.raises(OSError, match=r"1\.kv"):
        write_segment(tmp_path / "1.kv", IDENTITY, "tenant", RECORDS)

    assert [path.name for path in tmp_path.iterdir()] == ["1.kv"]
