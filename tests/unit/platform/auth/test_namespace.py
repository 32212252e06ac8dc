"""The tenant's namespace is the same at every start of a server in one data folder."""

import stat
from pathlib import Path

import pytest

from loraplex.platform.auth.namespace import kept_namespace
from loraplex.platform.errors import SettingsRefused


def test_a_data_folder_keeps_its_namespace(tmp_path: Path) -> None:
    assert kept_namespace(tmp_path / "new") == kept_namespace(tmp_path / "new")


def test_each_data_folder_has_its_own(tmp_path: Path) -> None:
    assert kept_namespace(tmp_path / "one") != kept_namespace(tmp_path / "two")


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    kept_namespace(tmp_path)

    assert stat.S_IMODE((tmp_path / "namespace").stat().st_mode) == 0o600


@pytest.mark.parametrize("damage", [b"", b"x" * 32, b"\xff\xfe", b"ab" * 17])
def test_a_damaged_one_is_replaced_for_good(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "namespace").write_bytes(damage)

    found = kept_namespace(tmp_path)

    assert len(bytes.fromhex(found)) == 16
    assert kept_namespace(tmp_path) == found


def test_a_data_folder_that_cannot_be_used_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")

    with pytest.raises(
        SettingsRefused, match=r"LORAPLEX_HOME: '.*/file' cannot be used.*no folder"
    ):
        kept_namespace(tmp_path / "file")
