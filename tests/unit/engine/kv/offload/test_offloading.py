"""What was offloaded and fetched again cannot be told from what never left."""

import threading
from pathlib import Path
from typing import Any

import pytest
from support.engine.offloading import OffloadingHarness
from support.engine.preempting import flush_cache, preempt_all
from support.engine.scheduling import Answer, SchedulerHarness, generate_request, undisturbed

from loraplex.engine.kv.offload import disk_tier
from loraplex.engine.kv.offload.segment import Record
from loraplex.engine.kv.tiers import DiskBlock

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


def answers(harness: SchedulerHarness, request_id: str, n: int = 1) -> list[Answer]:
    return [harness.answers[request_id, index] for index in range(n)]


def test_what_is_fetched_counts_as_cached() -> None:
    harness = OffloadingHarness()
    harness.add(generate_request("first", PROMPT))
    harness.run()
    harness.flush_device()

    harness.add(generate_request("second", PROMPT))
    harness.run()

    assert harness.num_cached["second"] == 16
    assert harness.answers["second", 0] == harness.answers["first", 0]


def test_a_return_from_preemption_leaves_the_usage_as_it_was() -> None:
    harness = OffloadingHarness()
    sequence = harness.add(generate_request("r", PROMPT, max_tokens=12, ignore_eos=True))
    harness.step()
    preempt_all(harness.scheduler)
    flush_cache(harness.scheduler)

    harness.run()

    assert (sequence.num_cached_tokens, harness.offload.stats().host_hits > 0) == (0, True)


@pytest.mark.parametrize(
    "other",
    [{"adapter": "b"}, {}, {"adapter": "a", "namespace": "other"}],
    ids=["another adapter", "the base model", "another tenant"],
)
def test_no_tier_serves_what_another_identity_left(other: dict[str, str], tmp_path: Path) -> None:
    harness = OffloadingHarness(folder=tmp_path)
    harness.add(generate_request("a", PROMPT, adapter="a"))
    harness.run()
    harness.flush_device()
    request = generate_request("other", PROMPT, **other)

    harness.add(request)
    harness.run()
    harness.flush_host()
    again = generate_request("again", PROMPT, **other)
    harness.add(again)
    harness.run()

    assert harness.num_cached["other"] == 0
    assert answers(harness, "other") == answers(harness, "again") == undisturbed(request)


def test_blocks_come_back_from_the_disk(tmp_path: Path) -> None:
    harness = OffloadingHarness(folder=tmp_path)
    harness.add(generate_request("first", PROMPT))
    harness.run()
    harness.flush_device()
    harness.flush_host()

    harness.add(generate_request("second", PROMPT))
    harness.run(max_steps=1_000_000)

    assert (harness.num_cached["second"], harness.offload.stats().disk_hits) == (16, 6)
    assert harness.answers["second", 0] == harness.answers["first", 0]
    harness.offload.close()


def test_another_engine_finds_the_blocks_on_disk(tmp_path: Path) -> None:
    first = OffloadingHarness(folder=tmp_path)
    first.add(generate_request("r", PROMPT))
    first.run()
    first.flush_device()
    first.flush_host()
    first.offload.close()

    second = OffloadingHarness(folder=tmp_path)
    second.add(generate_request("r", PROMPT))
    second.run(max_steps=1_000_000)

    assert second.num_cached["r"] == 16
    assert second.answers == first.answers
    second.offload.close()


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that gives nothing until the event is set."""
    ready, read = threading.Event(), disk_tier._read

    def read_slowly(*arguments: Any) -> list[Record | None]:
        assert ready.wait(timeout=60)
        return read(*arguments)

    monkeypatch.setattr(disk_tier, "_read", read_slowly)
    return ready


def with_blocks_on_disk(folder: Path, prompt: list[int]) -> OffloadingHarness:
    harness = OffloadingHarness(folder=folder)
    harness.add(generate_request("before", prompt))
    harness.run()
    harness.flush_device()
    harness.flush_host()
    return harness


def test_a_slow_disk_holds_up_its_own_sequence_only(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    harness = with_blocks_on_disk(tmp_path, PROMPT)
    waiting = harness.add(generate_request("waiting", PROMPT))
    harness.step()

    harness.add(generate_request("other", PROMPT[::-1]))
    for _ in range(9):
        harness.step()

    assert harness.answers["other", 0].finish_reason is not None
    assert waiting in harness.scheduler.waiting
    slow_disk.set()
    harness.run(max_steps=1_000_000)
    assert harness.num_cached["waiting"] == 16
    harness.offload.close()


def test_who_has_waited_as_long_as_computing_takes_computes(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    harness = with_blocks_on_disk(tmp_path, PROMPT)
    harness.recompute.seconds_per_token = 1e-3
    harness.add(generate_request("r", PROMPT))

    harness.run(max_steps=1_000_000)

    assert harness.num_cached["r"] == 0
    slow_disk.set()
    harness.offload.close()


def test_a_sequence_that_is_aborted_while_it_waits_leaves_nothing(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    harness = with_blocks_on_disk(tmp_path, PROMPT)
    sequence = harness.add(generate_request("r", PROMPT))
    harness.step()
    was_awaiting = harness.offload.is_awaiting(sequence.seq_id)

    harness.scheduler.abort("r")

    assert (was_awaiting, harness.offload.is_awaiting(sequence.seq_id)) == (True, False)
    slow_disk.set()
    harness.offload.close()
    harness.check_nothing_is_held()


def test_a_block_on_its_way_is_found_but_cannot_be_fetched_yet() -> None:
    harness = OffloadingHarness()
    harness.add(generate_request("r", PROMPT))
    harness.run()
    block = next(block for block in harness.kv.pool.blocks if block.key is not None)
    key, tokens = block.key, block.token_ids
    assert key is not None
    flush_cache(harness.scheduler)

    early = harness.offload.find_here(key, tokens)
    harness.settle()

    assert early is None
    assert harness.offload.find_here(key, tokens) is harness.offload.find(key, tokens) is not None


def test_a_block_on_disk_under_the_same_key_but_of_other_tokens_is_not_served(
    tmp_path: Path,
) -> None:
    """As if two keys had collided."""
    harness = OffloadingHarness(folder=tmp_path)
    offload, key, tokens = harness.offload, (0, b"key"), (1, 2, 3, 4)
    assert offload.disk is not None
    offload.disk.put("tenant", Record(key, (5, 6, 7, 8), bytes(32)))
    offload.disk.flush()

    offload.await_blocks(0, "tenant", [DiskBlock(key, tokens)], num_tokens=4)
    while offload.is_awaiting(0):
        pass
    offload.begin_step()

    assert offload.find_here(key, tokens) is None
    harness.close()


def test_a_tenant_that_floods_the_cache_leaves_another_its_offloaded_blocks() -> None:
    harness = OffloadingHarness(num_host_slots=30)
    harness.add(generate_request("quiet", PROMPT, tenant="quiet", namespace="quiet"))
    harness.run()
    harness.flush_device()
    for number in range(10):
        prompt = [number, *PROMPT]
        harness.add(generate_request(f"{number}", prompt, tenant="loud", namespace="loud"))
        harness.run()
        harness.flush_device()

    harness.add(generate_request("again", PROMPT, tenant="quiet", namespace="quiet"))
    harness.run()

    assert harness.num_cached["again"] == 16
