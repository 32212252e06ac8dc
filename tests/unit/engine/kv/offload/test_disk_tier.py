"""Blocks on disk survive a restart, keep to the limit, and never stop the engine."""

import logging
import os
import resource
import subprocess
import sys
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.offload import IDENTITY, Clock, key_of, read, record_of, reopen

from loraplex.engine.kv.offload import disk_tier
from loraplex.engine.kv.offload.disk_folder import DiskFolder
from loraplex.engine.kv.offload.disk_tier import DiskTier
from loraplex.engine.kv.offload.segment import record_bytes, write_segment

PLENTY = 1 << 20
ACCOUNT = "tenant"


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "offload", PLENTY, IDENTITY)


def put(tier: DiskTier, *numbers: int, account: str = ACCOUNT) -> None:
    """Writes these blocks into one segment."""
    for number in numbers:
        assert tier.put(account, record_of(number))
    tier.flush()


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def test_a_block_is_there_at_once_and_once_it_is_written(tier: DiskTier) -> None:
    tier.put(ACCOUNT, record_of(1))
    early = read(tier, [1])
    tier.flush()

    assert (early, read(tier, [1])) == ([record_of(1)], [record_of(1)])


def test_many_blocks_share_a_file(tier: DiskTier, tmp_path: Path) -> None:
    put(tier, *range(20))

    assert len(files(tmp_path)) == 1


def test_a_restart_finds_what_was_written(tier: DiskTier, tmp_path: Path) -> None:
    put(tier, 1, 2)

    restarted = reopen(tier, tmp_path / "offload", PLENTY)

    assert read(restarted, [1, 2]) == [record_of(1), record_of(2)]
    assert restarted.usage.keys() == {ACCOUNT}


def test_blocks_of_another_model_are_deleted_at_the_start(tier: DiskTier, tmp_path: Path) -> None:
    put(tier, 1)
    tier.close()

    other = DiskTier(
        tmp_path / "offload", PLENTY, msgspec.structs.replace(IDENTITY, model_revision="2")
    )

    assert (key_of(1) in other, files(tmp_path)) == (False, [])


def test_what_a_crash_left_half_written_is_deleted_at_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "offload" / "0"
    folder.mkdir(parents=True)
    (folder / "000000000001.tmp").write_bytes(b"half")
    (folder / "000000000002.kv").write_bytes(b"")

    DiskTier(tmp_path / "offload", PLENTY, IDENTITY)

    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_two_engines_on_one_folder_do_not_meet(tier: DiskTier, tmp_path: Path) -> None:
    put(tier, 1)

    other = DiskTier(tmp_path / "offload", PLENTY, IDENTITY)
    put(other, 2)

    assert (key_of(1) in other, key_of(2) in tier) == (False, False)
    assert [path.parent.name for path in files(tmp_path)] == ["0", "1"]


def test_the_folder_is_closed_to_others(tier: DiskTier, tmp_path: Path) -> None:
    put(tier, 1)

    modes = {p.stat().st_mode & 0o777 for p in [tmp_path / "offload", tmp_path / "offload" / "0"]}

    assert modes == {0o700}


def test_a_damaged_block_is_a_miss_and_is_forgotten(tier: DiskTier, tmp_path: Path) -> None:
    put(tier, 1, 2)
    (file,) = files(tmp_path)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)

    found = read(tier, [1, 2])

    assert found == [record_of(1), None]
    assert (key_of(2) in tier, tier.num_discarded) == (False, 1)


def test_a_file_that_was_deleted_is_a_miss(tier: DiskTier, tmp_path: Path) -> None:
    put(tier, 1)
    files(tmp_path)[0].unlink()

    assert read(tier, [1]) == [None]
    assert tier.is_on


def test_the_file_used_longest_ago_leaves_first(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "offload", 3 * 600, IDENTITY)
    for number in (1, 2, 3):
        put(tier, number)
    read(tier, [1])

    while key_of(2) in tier and key_of(1) in tier:
        put(tier, 100 + tier.num_written_bytes)

    assert key_of(1) in tier


def test_the_files_never_exceed_the_limit_while_a_storm_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, seen = 40 * record_bytes(IDENTITY), [0]

    def write(path: Path, *arguments: Any) -> None:
        write_segment(path, *arguments)
        seen.append(sum(file.stat().st_size for file in path.parent.iterdir()))

    monkeypatch.setattr(disk_tier, "write_segment", write)
    monkeypatch.setattr(disk_tier, "SEGMENT_BYTES", 3 * record_bytes(IDENTITY))
    tier = DiskTier(tmp_path / "offload", limit, IDENTITY)
    for number in count():
        tier.put("abc"[number % 3], record_of(number))
        tier.collect()
        if len(seen) > 50:
            break
    tier.close()

    assert limit / 2 < max(seen) <= limit


def test_a_file_that_cannot_be_deleted_turns_the_tier_off(tmp_path: Path) -> None:
    """Or it would stay, and no longer be counted."""
    tier = DiskTier(tmp_path / "offload", 2 * 500, IDENTITY)
    put(tier, 1)
    (file,) = files(tmp_path)
    file.unlink()
    file.mkdir()

    for number in range(2, 8):
        tier.put(ACCOUNT, record_of(number))
        tier.flush()

    assert not tier.is_on


def test_what_engines_that_are_gone_left_behind_is_taken_over(tmp_path: Path) -> None:
    engines = [DiskTier(tmp_path / "offload", PLENTY, IDENTITY) for _ in range(3)]
    for number, engine in enumerate(engines):
        put(engine, number)
    for gone in engines[:2]:
        gone.close()

    restarted = DiskTier(tmp_path / "offload", PLENTY, IDENTITY)

    assert read(restarted, [0, 1]) == [record_of(0), record_of(1)]
    assert [path.parent.name for path in files(tmp_path)] == ["0", "0", "2"]
    assert key_of(2) not in restarted


def test_an_engine_that_is_killed_while_it_writes_leaves_nothing_that_is_wrong(
    tmp_path: Path,
) -> None:
    endless = (
        "import itertools, sys; from pathlib import Path; from support.engine.offload import *\n"
        "tier = DiskTier(Path(sys.argv[1]), 1 << 20, IDENTITY)\n"
        "for number in itertools.count():\n"
        "    tier.put('tenant', record_of(number)); tier.flush()\n"
    )
    path = os.pathsep.join(sys.path)
    engine = subprocess.Popen(
        [sys.executable, "-c", endless, str(tmp_path)], env=os.environ | {"PYTHONPATH": path}
    )
    while len(files(tmp_path)) < 50:
        assert engine.poll() is None
    engine.kill()
    engine.wait()

    restarted = DiskTier(tmp_path, PLENTY, IDENTITY)
    found = [number for number in range(10_000) if key_of(number) in restarted]

    assert len(found) >= 50
    assert read(restarted, found) == [record_of(number) for number in found]
    assert list(tmp_path.rglob("*.tmp")) == []


def test_a_full_disk_turns_the_tier_off_and_leaves_no_half_of_a_file(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "offload", PLENTY, IDENTITY)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))
    try:
        put(tier, 1)
        put(tier, *range(2, 9))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert (tier.is_on, key_of(1) in tier) == (False, False)
    names = sorted(path.name for path in (tmp_path / "offload" / "0").iterdir())
    assert names == ["000000000001.kv", "lock"]


def test_a_tenant_that_floods_the_disk_leaves_another_its_blocks(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "offload", 10_000, IDENTITY)
    put(tier, 1, 2, 3, account="quiet")

    for number in range(100, 200):
        put(tier, number, account="flood")

    assert read(tier, [1, 2, 3]) == [record_of(1), record_of(2), record_of(3)]


def test_too_much_at_once_is_not_taken(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "QUEUE_BYTES", 2 * record_bytes(IDENTITY))

    taken = [tier.put(ACCOUNT, record_of(number)) for number in (1, 2, 3)]

    assert taken == [True, True, False]


def test_little_is_written_too_when_it_has_waited(tmp_path: Path) -> None:
    clock = Clock()
    tier = DiskTier(tmp_path / "offload", PLENTY, IDENTITY, clock)
    tier.put(ACCOUNT, record_of(1))

    clock.now = disk_tier.MAX_AGE
    tier.collect()
    tier.close()

    assert len(files(tmp_path)) == 1


def test_a_folder_that_cannot_be_used_turns_the_tier_off_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "offload").write_text("a file")

    with caplog.at_level(logging.WARNING):
        tier = DiskTier(tmp_path / "offload", PLENTY, IDENTITY)
        taken = tier.put(ACCOUNT, record_of(1))
        tier.collect()
        tier.close()

    assert (tier.is_on, taken, len(caplog.records)) == (False, False, 1)


def test_a_write_that_fails_turns_the_tier_off_with_one_warning(
    tier: DiskTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tier, 1)
    (tmp_path / "offload" / "0" / "000000000002.kv").mkdir()  # in the next file's way

    tier.put(ACCOUNT, record_of(2))
    tier.put("other", record_of(3))
    with caplog.at_level(logging.WARNING):
        tier.flush()

    assert (tier.is_on, key_of(1) in tier, len(caplog.records)) == (False, False, 1)
    tier.close()


def test_a_read_that_fails_turns_the_tier_off(tier: DiskTier, tmp_path: Path) -> None:
    put(tier, 1)
    (file,) = files(tmp_path)
    file.unlink()
    file.mkdir()

    assert read(tier, [1]) == [None]
    assert not tier.is_on


@given(
    st.lists(st.tuples(st.sampled_from("ppprfco"), st.integers(0, 30)), max_size=40),
    st.integers(1, 4),
)
def test_the_books_balance_and_only_what_was_put_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    actions: list[tuple[str, int]],
    limit: int,
) -> None:
    folder = tmp_path_factory.mktemp("offload")
    clock = Clock()
    tier = DiskTier(folder, limit * 500, IDENTITY, clock)
    outcomes: Counter[str] = Counter()
    for action, number in actions:
        match action:
            case "p" if key_of(number) not in tier:
                tier.put("ab"[number % 2], record_of(number))
            case "r" if key_of(number) in tier:
                assert read(tier, [number]) == [record_of(number)]
                outcomes["read"] += 1
            case "f":
                tier.flush()
            case "c":
                clock.now += 1.0
                tier.collect()
            case "o":
                tier.close()
                tier = DiskTier(folder, limit * 500, IDENTITY, clock)
        tier.check_integrity()
    tier.close()  # what was to be deleted is gone only then
    tier.check_integrity()
    assert tier.num_bytes <= sum(file.stat().st_size for file in files(folder)) <= limit * 500


def test_files_with_names_of_other_digits_are_no_segments(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "².kv").touch()
    (tmp_path / "²").mkdir()

    folder = DiskFolder(tmp_path)

    assert folder.new_path().name == "000000000001.kv"
    folder.close()
