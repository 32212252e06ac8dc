"""AdapterStore: content-addressed copies that appear whole and never change."""

import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loraplex.adapters.errors import AdapterRejected, AdapterUnavailable
from loraplex.adapters.store import AdapterStore, StoredAdapter

LIMIT = 1 << 20


def write(folder: Path, value: float = 1.0, alpha: int = 8) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "lora_alpha": alpha, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({"a": torch.full((4,), value)}, folder / "adapter_model.safetensors")
    return folder


def add(store: AdapterStore, folder: Path) -> StoredAdapter:
    with store.stage(folder, LIMIT) as staged:
        return store.publish(staged)


def published(store: AdapterStore) -> list[str]:
    return sorted(path.name for path in store.root.iterdir() if len(path.name) == 64)


@pytest.fixture
def store(tmp_path: Path) -> AdapterStore:
    return AdapterStore(tmp_path / "store")


def test_the_same_content_is_kept_once(store: AdapterStore, tmp_path: Path) -> None:
    one, two = add(store, write(tmp_path / "a")), add(store, write(tmp_path / "b"))
    assert one == two
    assert published(store) == [one.digest]


def test_other_weights_or_another_config_are_other_content(
    store: AdapterStore, tmp_path: Path
) -> None:
    folders = [
        write(tmp_path / "a"),
        write(tmp_path / "b", value=2),
        write(tmp_path / "c", alpha=9),
    ]
    assert len({add(store, folder).digest for folder in folders}) == 3


def test_a_copy_is_a_peft_folder_of_the_same_digest(store: AdapterStore, tmp_path: Path) -> None:
    stored = add(store, write(tmp_path / "a"))
    assert add(store, stored.folder) == stored


def test_nothing_appears_before_it_is_published(store: AdapterStore, tmp_path: Path) -> None:
    with store.stage(write(tmp_path / "a"), LIMIT):
        seen = published(store)
    assert (seen, published(store)) == ([], [])
    assert list((store.root / "staging").iterdir()) == []


def test_a_change_of_the_source_does_not_reach_the_copy(
    store: AdapterStore, tmp_path: Path
) -> None:
    stored = add(store, write(tmp_path / "a"))
    write(tmp_path / "a", value=3)
    store.verify(stored)


def test_copies_are_read_only(store: AdapterStore, tmp_path: Path) -> None:
    stored = add(store, write(tmp_path / "a"))
    assert {path.stat().st_mode & 0o222 for path in stored.folder.iterdir()} == {0}


def test_a_damaged_copy_is_found_out(store: AdapterStore, tmp_path: Path) -> None:
    stored = add(store, write(tmp_path / "a"))
    stored.weights_path.chmod(0o644)
    stored.weights_path.write_bytes(stored.weights_path.read_bytes()[:-1] + b"!")
    with pytest.raises(AdapterUnavailable, match="damaged"):
        store.verify(stored)


def test_a_damaged_copy_does_not_hide_the_manifests_of_others(
    store: AdapterStore, tmp_path: Path
) -> None:
    good = add(store, write(tmp_path / "good"))
    config = add(store, write(tmp_path / "bad", alpha=16)).folder / "adapter_config.json"
    config.chmod(0o600)
    config.write_text("{")

    assert store.manifests(9) == [good.manifest]


def test_a_copy_that_is_gone_is_found_out(store: AdapterStore, tmp_path: Path) -> None:
    stored = add(store, write(tmp_path / "a"))
    stored.weights_path.unlink()
    with pytest.raises(AdapterUnavailable, match="cannot be read"):
        store.verify(stored)


def test_a_weights_file_above_the_limit_is_not_copied(store: AdapterStore, tmp_path: Path) -> None:
    with (
        pytest.raises(AdapterRejected, match="more than the 10 bytes"),
        store.stage(write(tmp_path / "a"), 10),
    ):
        pass


@pytest.mark.parametrize("name", ["nothing here", "a\0b", "x" * 300])
def test_a_folder_that_is_none_is_refused(store: AdapterStore, tmp_path: Path, name: str) -> None:
    with pytest.raises(AdapterRejected, match="is missing"), store.stage(tmp_path / name, LIMIT):
        pass


def test_many_at_once_publish_one_copy(store: AdapterStore, tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    digests: list[str] = []

    def publish() -> None:
        digests.append(add(AdapterStore(store.root), folder).digest)

    threads = [threading.Thread(target=publish) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(digests), published(store)) == (8, [digests[0]])


def test_what_a_crash_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    left, busy = (tmp_path / "staging" / name for name in ("left", "busy"))
    for folder in (left, busy):
        write(folder)
    hours_ago = time.time() - 7200
    os.utime(left, (hours_ago, hours_ago))
    AdapterStore(tmp_path)
    assert (left.exists(), busy.exists()) == (False, True)
