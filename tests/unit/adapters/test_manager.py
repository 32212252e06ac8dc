"""LoRAManager: an adapter's life from its files to its slot, and out again."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.models.adapters import PEFT_NOISE, Served, edit_config, edit_tensors, write_adapter
from support.models.architectures import write_checkpoint

from loraplex.adapters.checks.checker import AdapterChecker
from loraplex.adapters.errors import (
    AdapterInUse,
    AdapterNotFound,
    AdapterRejected,
    AdapterUnavailable,
)
from loraplex.adapters.manifest import AdapterRef
from loraplex.adapters.registration import StoredCopy

pytestmark = PEFT_NOISE

IDS = torch.arange(5, 14)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "base", "llama")


@pytest.fixture(scope="module")
def template(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "template"
    return write_adapter(base, folder, r=4, target_modules=["q_proj", "v_proj"])


@pytest.fixture
def make(template: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Writes adapters of the same shape and other content."""

    def write(name: str) -> Path:
        folder = Path(shutil.copytree(template, tmp_path / "sources" / name))
        generator = torch.Generator().manual_seed(sum(name.encode()))

        def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {k: torch.randn(t.shape, generator=generator) for k, t in tensors.items()}

        return edit_tensors(folder, change)

    return write


@pytest.fixture
def served(base: Path, tmp_path: Path) -> Iterator[Served]:
    served = Served(base, tmp_path / "store", num_slots=2)
    yield served
    served.manager.check_integrity()
    served.close()


@pytest.fixture
def served_without_host_memory(base: Path, tmp_path: Path) -> Iterator[Served]:
    """Of adapters that nobody has asked for yet it keeps none."""
    served = Served(base, tmp_path / "store", num_slots=2, host_bytes=0)
    yield served
    served.manager.check_integrity()
    served.close()


def test_tells_what_it_registered(served: Served, make: Callable[[str], Path]) -> None:
    folder = edit_config(make("a"), base_model_name_or_path="org/BASE/")
    info = served.manager.register("tenant", "id", folder)
    assert (info.ref.tenant, info.ref.adapter_id, len(info.ref.digest)) == ("tenant", "id", 64)
    assert (info.rank, info.num_modules, info.target_modules) == (4, 6, ["q_proj", "v_proj"])
    assert info.num_bytes == 4 * 3 * 4 * (64 + 64 + 64 + 32)
    assert (info.activation, info.base_model, info.base_mismatch) == (
        "always",
        "org/BASE/",
        False,
    )
    assert served.manager.info(info.ref) == info


def test_another_base_is_refused_unless_it_is_allowed(
    served: Served, make: Callable[[str], Path]
) -> None:
    folder = edit_config(make("a"), base_model_name_or_path="org/other")
    with pytest.raises(AdapterRejected, match=r"trained on 'other', the served .* is 'base'"):
        served.register(folder)
    assert served.manager.register("t", "a", folder, allow_base_mismatch=True).base_mismatch


def test_an_adapter_that_names_no_base_is_accepted(
    served: Served, make: Callable[[str], Path]
) -> None:
    folder = edit_config(make("a"), base_model_name_or_path=None)
    assert not served.manager.info(served.register(folder)).base_mismatch


def test_the_same_content_is_stored_once_and_shares_a_slot(
    served: Served, make: Callable[[str], Path]
) -> None:
    folder = make("a")
    refs = [served.register(folder, "a", tenant) for tenant in ("t", "u", "t")]
    assert refs[0] == refs[2] != refs[1]
    assert refs[0].digest == refs[1].digest
    assert served.acquire(refs[0]) == served.acquire(refs[1])
    assert (served.manager.stats().registered, served.manager.stats().resident) == (2, 1)
    for ref in refs[:2]:
        served.manager.release(ref)


def test_the_source_is_not_needed_again(
    served: Served, make: Callable[[str], Path], tmp_path: Path
) -> None:
    refs = [served.register(make(name), name) for name in ("a", "b", "c")]
    shutil.rmtree(tmp_path / "sources")
    for ref in refs * 2:
        served.acquire(ref)
        served.manager.release(ref)
    assert served.manager.stats().evictions == 4


def test_more_adapters_than_slots_and_host_memory_give_their_own_output(
    base: Path, make: Callable[[str], Path], tmp_path: Path
) -> None:
    served = Served(base, tmp_path / "small", num_slots=1, host_bytes=1)
    refs = [served.register(make(name), name) for name in ("a", "b", "c")]

    def run(ref: AdapterRef) -> torch.Tensor:
        logits = served.logits(IDS, [served.acquire(ref)])
        served.manager.release(ref)
        return logits

    first = [run(ref) for ref in refs]
    second = [run(ref) for ref in refs]
    served.close()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.allclose(first[0], first[1], atol=0.1)


def test_a_slot_in_use_does_not_move_and_none_is_given_beyond(
    served: Served, make: Callable[[str], Path]
) -> None:
    refs = [served.register(make(name), name) for name in ("a", "b", "c")]
    slots = [served.acquire(ref) for ref in refs[:2]]
    while not served.manager.prepare(refs[2]):
        time.sleep(0.001)
    assert served.manager.acquire(refs[2]) is None
    assert [served.acquire(ref) for ref in refs[:2]] == slots
    assert served.manager.num_references(refs[0]) == 2
    for ref in refs[:2] * 2:
        served.manager.release(ref)
    assert served.manager.acquire(refs[2]) in slots
    served.manager.release(refs[2])


def test_a_new_adapter_is_at_hand_without_a_load(
    served: Served, make: Callable[[str], Path]
) -> None:
    ref = served.register(make("a"))
    assert served.manager.acquire(ref) == 0
    assert served.manager.stats().loads == 0
    served.manager.release(ref)


def test_nothing_can_be_acquired_before_it_is_loaded(
    served_without_host_memory: Served, make: Callable[[str], Path]
) -> None:
    served = served_without_host_memory
    assert served.manager.acquire(served.register(make("a"))) is None


def test_a_damaged_copy_fails_alone_and_recovers(
    served_without_host_memory: Served, make: Callable[[str], Path], tmp_path: Path
) -> None:
    served = served_without_host_memory
    broken, sound = (served.register(make(name), name) for name in ("a", "b"))
    shutil.rmtree(tmp_path / "sources")
    weights = tmp_path / "store" / broken.digest / "adapter_model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    with pytest.raises(AdapterUnavailable, match="cannot be read, and cannot be made again"):
        served.acquire(broken)
    served.acquire(sound)
    (tmp_path / "elsewhere").rename(weights)
    while served.manager.load_error(broken):
        time.sleep(0.01)
    served.acquire(broken)
    for ref in (broken, sound):
        served.manager.release(ref)


def damage(path: Path) -> None:
    """Changes one bit of the last weight."""
    data = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_a_damaged_copy_is_mended_from_its_source_when_it_is_loaded(
    served_without_host_memory: Served, make: Callable[[str], Path], tmp_path: Path
) -> None:
    served = served_without_host_memory
    ref = served.register(make("a"))
    weights = tmp_path / "store" / ref.digest / "adapter_model.safetensors"
    sound = weights.read_bytes()
    damage(weights)

    served.acquire(ref)

    assert weights.read_bytes() == sound
    served.manager.release(ref)


def test_a_copy_whose_source_has_other_content_now_is_not_mended(
    served: Served, make: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = make("a")
    ref = served.register(folder)
    damage(tmp_path / "store" / ref.digest / "adapter_model.safetensors")
    edit_config(folder, lora_alpha=99)

    with pytest.raises(AdapterUnavailable, match=r"is damaged, .* the content .* has changed"):
        served.manager.register("t", "b", StoredCopy(ref.digest, folder))
    with pytest.raises(AdapterUnavailable, match="is damaged"):
        served.manager.register("t", "b", StoredCopy(ref.digest))


def test_a_stored_copy_is_registered_without_its_source(
    served: Served, make: Callable[[str], Path], tmp_path: Path
) -> None:
    first = served.register(make("a"), "one")
    shutil.rmtree(tmp_path / "sources")
    info = served.manager.register("u", "two", StoredCopy(first.digest))
    assert (info.ref.digest, info.num_modules) == (first.digest, 6)


def test_a_stored_copy_whose_plan_was_lost_is_checked_again(
    served: Served, make: Callable[[str], Path], tmp_path: Path
) -> None:
    ref = served.register(make("a"))
    (plan,) = (tmp_path / "store" / ref.digest).glob("plan-*")
    plan.unlink()
    assert served.manager.register("u", "two", StoredCopy(ref.digest)).num_modules == 6
    assert plan.exists()


def test_what_was_checked_once_is_not_checked_again(
    base: Path, make: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a slow expression costs no time at the next start."""
    folder = edit_config(make("a"), target_modules=r".*(q_proj|v_proj)")
    first = Served(base, tmp_path / "store")
    ref = first.register(folder)
    first.close()
    checked: list[Path] = []
    monkeypatch.setattr(AdapterChecker, "plan", lambda self, path: checked.append(path))

    again = Served(base, tmp_path / "store")
    assert again.register(folder) == ref
    assert again.manager.register("t", "b", StoredCopy(ref.digest)).ref.digest == ref.digest
    assert again.manager.stored_frontiers() == [0]
    again.close()

    assert checked == []


def test_nothing_remains_after_an_unregistration(
    served: Served, make: Callable[[str], Path]
) -> None:
    ref = served.register(make("a"))
    served.acquire(ref)
    served.manager.release(ref)
    served.manager.unregister(ref)
    stats = served.manager.stats()
    assert (stats.registered, stats.resident, stats.references, stats.host_bytes) == (0, 0, 0, 0)
    with pytest.raises(AdapterNotFound):
        served.manager.prepare(ref)


def test_the_content_stays_while_another_name_has_it(
    served: Served, make: Callable[[str], Path]
) -> None:
    folder = make("a")
    one, two = served.register(folder, "one"), served.register(folder, "two")
    slot = served.acquire(one)
    served.manager.release(one)
    served.manager.unregister(one)
    assert served.manager.acquire(two) == slot
    served.manager.release(two)


def test_an_adapter_in_use_cannot_be_unregistered(
    served: Served, make: Callable[[str], Path]
) -> None:
    ref = served.register(make("a"))
    served.acquire(ref)
    with pytest.raises(AdapterInUse):
        served.manager.unregister(ref)
    served.manager.release(ref)
    served.manager.unregister(ref)


@pytest.mark.parametrize("method", ["info", "manifest", "prepare", "acquire", "unregister"])
def test_an_unknown_adapter_is_not_found(served: Served, method: str) -> None:
    unknown = AdapterRef(tenant="t", adapter_id="a", digest="0" * 64)
    with pytest.raises(AdapterNotFound):
        getattr(served.manager, method)(unknown)


def test_many_adapters_leave_no_more_than_one_does(
    served: Served, make: Callable[[str], Path]
) -> None:
    folder = make("a")
    for index in range(50):
        ref = served.register(edit_config(folder, lora_alpha=index + 1), str(index))
        served.acquire(ref)
        served.manager.release(ref)
        served.manager.unregister(ref)
    stats = served.manager.stats()
    assert (stats.resident, stats.host_bytes, stats.registered) == (0, 0, 0)


def test_an_adapter_larger_than_the_device_memory_for_all_is_refused(
    base: Path, make: Callable[[str], Path], tmp_path: Path
) -> None:
    served = Served(base, tmp_path / "store", device_bytes=10_000)

    with pytest.raises(AdapterRejected, match=r"takes 10,752 bytes, .* has 10,000 for all"):
        served.register(make("a"))

    served.close()


def test_idle_adapters_leave_the_device_for_one_that_needs_their_memory(
    base: Path, make: Callable[[str], Path], tmp_path: Path
) -> None:
    served = Served(base, tmp_path / "store", num_slots=3, device_bytes=2 * 10_752)
    refs = [served.register(make(name), name) for name in "abc"]
    for ref in refs:
        served.acquire(ref)
        served.manager.release(ref)

    assert served.manager.stats().resident == 2
    assert served.manager.acquire(refs[0]) is not None
    served.manager.release(refs[0])
    served.close()
