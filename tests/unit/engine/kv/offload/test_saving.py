"""What is in memory at a clean stop is on the disk at the next start, the most useful first."""

from pathlib import Path

import pytest
from support.engine.offload import Clock
from support.engine.offloading import OffloadingHarness
from support.engine.scheduling import generate_request

from loraplex.engine.kv.offload import manager as offload_manager
from loraplex.engine.kv.offload.disk_tier import DiskTier
from loraplex.engine.kv.offload.manager import SAVE_SECONDS

FIRST = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
SECOND = FIRST[::-1]
DISK = 2000  # bytes: room for the blocks of one of them


def serve(harness: OffloadingHarness, prompt: list[int], request_id: str) -> int:
    """Runs a request; returns how many of its tokens were cached."""
    harness.add(generate_request(request_id, prompt, max_tokens=2))
    harness.run(max_steps=1_000_000)
    return harness.num_cached[request_id]


def stop(harness: OffloadingHarness) -> None:
    harness.offload.save(harness.kv.pool.findable())
    harness.close()


def cached_after(folder: Path, *prompts: list[int]) -> list[int]:
    """What an engine that starts now finds of each prompt."""
    harness = OffloadingHarness(folder=folder)
    found = [serve(harness, prompt, f"{number}") for number, prompt in enumerate(prompts)]
    harness.close()
    return found


def test_what_the_device_and_host_memory_have_is_found_after_a_restart(tmp_path: Path) -> None:
    harness = OffloadingHarness(folder=tmp_path)
    serve(harness, FIRST, "in host memory")
    harness.flush_device()
    serve(harness, SECOND, "on the device")

    stop(harness)

    assert cached_after(tmp_path, FIRST, SECOND) == [16, 16]


def test_nothing_is_written_twice(tmp_path: Path) -> None:
    harness = OffloadingHarness(folder=tmp_path)
    serve(harness, FIRST, "r")
    harness.offload.save(harness.kv.pool.findable())
    written = harness.offload.stats().written_bytes

    stop(harness)

    assert harness.offload.stats().written_bytes == written > 0


def test_a_small_disk_keeps_what_was_used_last(tmp_path: Path) -> None:
    harness = OffloadingHarness(folder=tmp_path, disk_bytes=DISK)
    serve(harness, FIRST, "early")
    serve(harness, SECOND, "late")

    stop(harness)

    assert cached_after(tmp_path, FIRST, SECOND) == [0, 16]


def test_a_slow_disk_takes_what_it_can_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, flush = Clock(), DiskTier.flush

    def flush_slowly(tier: DiskTier) -> None:
        clock.now += SAVE_SECONDS / 3
        flush(tier)

    monkeypatch.setattr(DiskTier, "flush", flush_slowly)
    monkeypatch.setattr(offload_manager, "SAVE_BYTES", 1)
    harness = OffloadingHarness(folder=tmp_path, clock=clock)
    serve(harness, FIRST, "r")

    harness.offload.save(harness.kv.pool.findable())

    assert harness.offload.disk is not None
    assert len(list(harness.offload.disk.folder.glob("*.kv"))) == 3
    harness.close()
