"""Blocks on disk survive a restart, keep to the limit, and never stop the engine."""

import logging
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.swap import IDENTITY, Clock, key_of, read, record_of, reopen

from loraplex.engine.swap import disk_tier
from loraplex.engine.swap.disk_tier import DiskTier
from loraplex.engine.swap.segment import record_bytes

PLENTY = 1 << 20
ACCOUNT = "tenant"


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "swap", PLENTY, IDENTITY)


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

    restarted = reopen(tier, tmp_path / "swap", PLENTY)

    assert read(restarted, [1, 2]) == [record_of(1), record_of(2)]
    assert restarted.usage.keys() == {ACCOUNT}


def test_blocks_of_another_model_are_deleted_at_the_start(tier: DiskTier, tmp_path: Path) -> None:
    put(tier, 1)
    tier.close()

    other = DiskTier(
        tmp_path / "swap", PLENTY, msgspec.structs.replace(IDENTITY, model_revision="2")
    )

    assert (key_of(1) in other, files(tmp_path)) == (False, [])


def test_what_a_crash_left_half_written_is_deleted_at_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "swap" / "0"
    folder.mkdir(parents=True)
    (folder / "000000000001.tmp").write_bytes(b"half")
    (folder / "000000000002.kv").write_bytes(b"")

    DiskTier(tmp_path / "swap", PLENTY, IDENTITY)

    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_two_engines_on_one_folder_do_not_meet(tier: DiskTier, tmp_path: Path) -> None:
    put(tier, 1)

    other = DiskTier(tmp_path / "swap", PLENTY, IDENTITY)
    put(other, 2)

    assert (key_of(1) in other, key_of(2) in tier) == (False, False)
    assert [path.parent.name for path in files(tmp_path)] == ["0", "1"]


def test_the_folder_is_closed_to_others(tier: DiskTier, tmp_path: Path) -> None:
    put(tier, 1)

    modes = {p.stat().st_mode & 0o777 for p in [tmp_path / "swap", tmp_path / "swap" / "0"]}

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
    tier = DiskTier(tmp_path / "swap", 3 * 600, IDENTITY)
    for number in (1, 2, 3):
        put(tier, number)
    read(tier, [1])

    while key_of(2) in tier and key_of(1) in tier:
        put(tier, 100 + tier.num_written_bytes)

    assert key_of(1) in tier


def test_a_tenant_that_floods_the_disk_leaves_another_its_blocks(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "swap", 10_000, IDENTITY)
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
    tier = DiskTier(tmp_path / "swap", PLENTY, IDENTITY, clock)
    tier.put(ACCOUNT, record_of(1))

    clock.now = disk_tier.MAX_AGE
    tier.collect()
    tier.close()

    assert len(files(tmp_path)) == 1


def test_a_folder_that_cannot_be_used_turns_the_tier_off_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "swap").write_text("a file")

    with caplog.at_level(logging.WARNING):
        tier = DiskTier(tmp_path / "swap", PLENTY, IDENTITY)
        taken = tier.put(ACCOUNT, record_of(1))
        tier.collect()
        tier.close()

    assert (tier.is_on, taken, len(caplog.records)) == (False, False, 1)


def test_a_write_that_fails_turns_the_tier_off_with_one_warning(
    tier: DiskTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tier, 1)
    (tmp_path / "swap" / "0" / "000000000002.kv").mkdir()  # in the next file's way

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
    folder = tmp_path_factory.mktemp("swap")
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
