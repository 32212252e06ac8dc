"""AdapterStore: content-addressed copies that appear whole and never change."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loraplex.adapters.checks.judge import read_manifest
from loraplex.adapters.checks.plan import AdapterPlan
from loraplex.adapters.errors import AdapterRejected, AdapterUnavailable
from loraplex.adapters.store import AdapterStore, digest_of

LIMIT = 1 << 20
WEIGHTS = "adapter_model.safetensors"
BASE, OTHER_BASE = "b" * 64, "c" * 64


def write(folder: Path, value: float = 1.0, alpha: int = 8, **config: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "lora_alpha": alpha, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({"a": torch.full((4,), value)}, folder / WEIGHTS)
    return folder


def add(store: AdapterStore, folder: Path, base: str = BASE) -> str:
    """-> the digest"""
    manifest = read_manifest(folder)
    plan = AdapterPlan(base=base, manifest=manifest, modules=[], base_copies=[], file_size=0)
    with store.stage(folder, LIMIT) as staged:
        digest = digest_of(manifest.fingerprint, staged.weights_sha256)
        store.publish(staged, digest, plan)
    return digest


def published(store: AdapterStore) -> list[str]:
    return sorted(path.name for path in store.root.iterdir() if len(path.name) == 64)


def damage(path: Path) -> None:
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1] + b"!")


@pytest.fixture
def store(tmp_path: Path) -> AdapterStore:
    return AdapterStore(tmp_path / "store")


def test_the_same_content_is_kept_once(store: AdapterStore, tmp_path: Path) -> None:
    one, two = add(store, write(tmp_path / "a")), add(store, write(tmp_path / "b"))
    assert one == two
    assert published(store) == [one]


def test_other_weights_or_another_config_are_other_content(
    store: AdapterStore, tmp_path: Path
) -> None:
    folders = [
        write(tmp_path / "a"),
        write(tmp_path / "b", value=2),
        write(tmp_path / "c", alpha=9),
    ]
    assert len({add(store, folder) for folder in folders}) == 3


def test_a_copy_is_a_peft_folder_of_the_same_digest(store: AdapterStore, tmp_path: Path) -> None:
    digest = add(store, write(tmp_path / "a"))
    assert add(store, store.folder(digest)) == digest


def test_nothing_appears_before_it_is_published(store: AdapterStore, tmp_path: Path) -> None:
    with store.stage(write(tmp_path / "a"), LIMIT):
        seen = published(store)
    assert (seen, published(store)) == ([], [])
    assert list((store.root / "staging").iterdir()) == []


def test_a_change_of_the_source_does_not_reach_the_copy(
    store: AdapterStore, tmp_path: Path
) -> None:
    digest = add(store, write(tmp_path / "a"))
    write(tmp_path / "a", value=3)
    assert store.is_sound(digest)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_the_owner_can_read_copies_and_nobody_writes_them(tmp_path: Path, umask: int) -> None:
    old = os.umask(umask)
    try:
        store = AdapterStore(tmp_path / "store")
        digest = add(store, write(tmp_path / "a"))
    finally:
        os.umask(old)
    paths = [store.root, *store.root.rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o077 for path in paths} == {0}
    assert (store.folder(digest) / WEIGHTS).stat().st_mode & 0o222 == 0


def test_a_store_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o755)
    AdapterStore(tmp_path / "store")
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["adapter_config.json", WEIGHTS])
@pytest.mark.parametrize("harm", [damage, Path.unlink], ids=["damaged", "gone"])
def test_a_damaged_copy_is_replaced_when_the_content_comes_again(
    store: AdapterStore, tmp_path: Path, name: str, harm: Callable[[Path], None]
) -> None:
    digest = add(store, write(tmp_path / "a"))
    harm(store.folder(digest) / name)
    assert not store.is_sound(digest)

    assert add(store, tmp_path / "a") == digest

    assert store.is_sound(digest)
    assert (store.folder(digest) / name).read_bytes() == (tmp_path / "a" / name).read_bytes()


def test_another_tenants_config_of_the_same_content_changes_nothing(
    store: AdapterStore, tmp_path: Path
) -> None:
    digest = add(store, write(tmp_path / "a", base_model_name_or_path="mine"))
    kept = (store.folder(digest) / "adapter_config.json").read_bytes()
    assert add(store, write(tmp_path / "a", base_model_name_or_path="theirs")) == digest
    assert (store.folder(digest) / "adapter_config.json").read_bytes() == kept


def test_a_plan_is_kept_for_each_base_model(store: AdapterStore, tmp_path: Path) -> None:
    digest = add(store, write(tmp_path / "a"))
    add(store, tmp_path / "a", base=OTHER_BASE)
    plans = [store.plan(digest, base) for base in (BASE, OTHER_BASE, "d" * 64)]
    assert [plan and plan.base for plan in plans] == [BASE, OTHER_BASE, None]
    assert [plan.base for plan in store.plans(BASE, 9)] == [BASE]


def test_a_damaged_plan_is_none(store: AdapterStore, tmp_path: Path) -> None:
    good, bad = add(store, write(tmp_path / "a")), add(store, write(tmp_path / "b", alpha=9))
    (path,) = store.folder(bad).glob("plan-*")
    damage(path)
    assert store.plan(bad, BASE) is None
    assert store.plans(BASE, 9) == [store.plan(good, BASE)]


def test_a_copy_that_is_gone_cannot_be_opened(store: AdapterStore, tmp_path: Path) -> None:
    digest = add(store, write(tmp_path / "a"))
    (store.folder(digest) / WEIGHTS).unlink()
    with pytest.raises(AdapterUnavailable, match="cannot be read"), store.open_weights(digest):
        pass


@pytest.mark.parametrize("digest", ["", "..", "../" * 21 + "x", "A" * 64, "a" * 63 + "/"])
def test_what_is_no_digest_names_no_folder(store: AdapterStore, digest: str) -> None:
    with pytest.raises(AdapterRejected, match="64 hexadecimal digits"):
        store.folder(digest)


def test_a_weights_file_above_the_limit_is_not_copied(store: AdapterStore, tmp_path: Path) -> None:
    with (
        pytest.raises(AdapterRejected, match="more than the 10 bytes"),
        store.stage(write(tmp_path / "a"), 10),
    ):
        pass


def test_a_large_config_is_not_read(store: AdapterStore, tmp_path: Path) -> None:
    (write(tmp_path / "a") / "adapter_config.json").write_bytes(b" " * (15 << 20))
    with pytest.raises(AdapterRejected, match="larger than"), store.stage(tmp_path / "a", LIMIT):
        pass


@pytest.mark.parametrize("name", ["nothing here", "a\0b", "x" * 300])
def test_a_folder_that_is_none_is_refused(store: AdapterStore, tmp_path: Path, name: str) -> None:
    with pytest.raises(AdapterRejected, match="is missing"), store.stage(tmp_path / name, LIMIT):
        pass


def test_many_at_once_publish_one_copy(store: AdapterStore, tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    digests: list[str] = []

    def publish() -> None:
        digests.append(add(AdapterStore(store.root), folder))

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
