"""An engine has the tiers that its configuration asks for, and finds its files again."""

import threading
from pathlib import Path
from typing import Any

import pytest
from support.engine.engines import make_engine, request, run_one
from support.models.architectures import write_checkpoint

from loraplex.engine.errors import ConfigRefused
from loraplex.engine.kv.offload.manager import OffloadManager
from loraplex.engine.llm_engine import LLMEngine

PROMPT = list(range(1, 22))
OFFLOADING = {"offload_memory": 1 << 20, "offload_disk": 1 << 20}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"), "llama")


def tiers_of(engine: LLMEngine) -> OffloadManager:
    tiers = engine._scheduler.kv.tiers
    assert isinstance(tiers, OffloadManager)
    return tiers


def cached_tokens(engine: LLMEngine) -> int:
    usage = run_one(engine, request(PROMPT, "r")).usage
    assert usage is not None
    return usage.cached_tokens


def leave_on_disk(engine: LLMEngine) -> None:
    """Runs a prompt, and pushes its blocks down to the disk."""
    run_one(engine, request(PROMPT, "r"))
    pool, tiers = engine._scheduler.kv.pool, tiers_of(engine)
    pool.release([pool.allocate("t") for _ in range(pool.num_available("t"))])
    engine.step()
    engine.step()
    for index in range(tiers.host.num_slots):
        tiers.host.reserve((9, bytes([index % 256, index // 256])), (), "t")


def test_on_a_cpu_nothing_is_offloaded_unless_asked(base: Path, tmp_path: Path) -> None:
    engine = make_engine(base, tmp_path / "adapters")

    assert not isinstance(engine._scheduler.kv.tiers, OffloadManager)


def test_a_disk_brings_the_host_memory_that_it_needs(base: Path, tmp_path: Path) -> None:
    engine = make_engine(base, tmp_path / "adapters", offload_disk=1 << 20)

    assert tiers_of(engine).host.num_slots > 0
    engine.close()


def test_a_restarted_engine_finds_its_blocks(base: Path, tmp_path: Path) -> None:
    first = make_engine(base, tmp_path / "adapters", **OFFLOADING)
    leave_on_disk(first)
    first.close()

    second = make_engine(base, tmp_path / "adapters", **OFFLOADING)
    cached = cached_tokens(second)

    assert cached == 20
    assert second.stats().offload.disk_hits > 0
    second.close()


def test_an_engine_that_is_stopped_in_order_leaves_its_cache_on_disk(
    base: Path, tmp_path: Path
) -> None:
    first = make_engine(base, tmp_path / "adapters", **OFFLOADING)
    run_one(first, request(PROMPT, "r"))
    first.save_cache()
    first.close()

    second = make_engine(base, tmp_path / "adapters", **OFFLOADING)

    assert cached_tokens(second) == 20
    second.close()


@pytest.mark.parametrize(
    "change",
    [{"block_size": 2}, {"dtype": "bfloat16"}, {"kv_group_size": 1}],
    ids=["block size", "number format", "group split"],
)
def test_another_engine_does_not_find_them(
    base: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    first = make_engine(base, tmp_path / "adapters", **OFFLOADING)
    leave_on_disk(first)
    first.close()

    second = make_engine(base, tmp_path / "adapters", **OFFLOADING, **change)

    assert (second.stats().offload.disk_bytes, cached_tokens(second)) == (0, 0)
    second.close()


def test_an_engine_of_other_weights_does_not_find_them(base: Path, tmp_path: Path) -> None:
    first = make_engine(base, tmp_path / "adapters", **OFFLOADING)
    leave_on_disk(first)
    first.close()
    (tmp_path / "other").mkdir()
    other = write_checkpoint(tmp_path / "other", "llama", seed=1)

    second = make_engine(other, tmp_path / "adapters", **OFFLOADING)

    assert (second.stats().offload.disk_bytes, cached_tokens(second)) == (0, 0)
    second.close()


def test_an_engine_that_waits_for_the_disk_has_no_work(base: Path, tmp_path: Path) -> None:
    engine = make_engine(base, tmp_path / "adapters", **OFFLOADING)
    leave_on_disk(engine)
    disk = tiers_of(engine).disk
    assert disk is not None
    disk.flush()
    turn = threading.Event()
    disk._reader.submit(turn.wait, 30)  # the reader is busy
    engine.add(request(PROMPT, "r", namespace="n"))

    engine.step()

    assert (engine.has_work, engine.is_waiting) == (False, True)
    turn.set()
    engine.abort("r")
    engine.close()


def test_more_host_memory_than_there_is_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigRefused, match="offload_memory"):
        make_engine(base, tmp_path / "adapters", offload_memory=1 << 60)
