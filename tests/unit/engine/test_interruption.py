"""A generation that is preempted, at any or all of its steps, says what it would have said.

Its blocks stay on the device meanwhile, leave for a lower tier, or are lost.
"""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.engine.offloading import OffloadingHarness
from support.engine.preempting import flush_cache, preempt_all
from support.engine.scheduling import Answer, SchedulerHarness, Setup, generate_request, undisturbed

from loraplex.engine.protocol import FinishReason, GenerateRequest

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8]
CHUNK = 8  # tokens of the prompt in a step
NUM_TOKENS = 26  # of the answer, which a stop string ends
EVERYTHING: dict[str, Any] = {
    "temperature": 1.0,
    "seed": 2,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logprobs": 2,
    "max_tokens": 2 * NUM_TOKENS,
    "ignore_eos": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "one choice": {},
    "two choices": {"n": 2},
    "prompt logprobs": {"prompt_logprobs": 1},
    "an adapter": {"adapter": "a"},
}


def give_way(harness: SchedulerHarness) -> None:
    preempt_all(harness.scheduler)


def leave(harness: SchedulerHarness) -> None:
    """For host memory, where there is some."""
    preempt_all(harness.scheduler)
    flush_cache(harness.scheduler)


def leave_for_the_disk(harness: SchedulerHarness) -> None:
    assert isinstance(harness, OffloadingHarness)
    leave(harness)
    harness.settle()
    harness.flush_host()


def without_tiers(setup: Setup, folder: Path) -> SchedulerHarness:
    return SchedulerHarness(setup)


def above_host_memory(setup: Setup, folder: Path) -> SchedulerHarness:
    return OffloadingHarness(setup)


def above_a_disk(setup: Setup, folder: Path) -> SchedulerHarness:
    return OffloadingHarness(setup, folder=folder)


Make = Callable[[Setup, Path], SchedulerHarness]
Interrupt = Callable[[SchedulerHarness], None]
WAYS: dict[str, tuple[Make, Interrupt]] = {
    "stay": (without_tiers, give_way),
    "are lost": (without_tiers, leave),
    "go to host memory": (above_host_memory, leave),
    "go to the disk": (above_a_disk, leave_for_the_disk),
}


def ended_by_a_stop_string(**options: Any) -> GenerateRequest:
    free = generate_request("r", PROMPT, **EVERYTHING | options)
    words = undisturbed(free)[0].text.split(" ")
    stop = f"{words[NUM_TOKENS - 2][-2:]} {words[NUM_TOKENS - 1][0]}"
    return generate_request("r", PROMPT, stop=(stop,), **EVERYTHING | options)


def answers(harness: SchedulerHarness, request: GenerateRequest) -> list[Answer]:
    return [harness.answers["r", index] for index in range(request.sampling.n)]


def num_fetched(harness: SchedulerHarness) -> int:
    return harness.offload.stats().host_hits if isinstance(harness, OffloadingHarness) else 0


@pytest.mark.parametrize(
    ("kind", "way"),
    [("one choice", way) for way in WAYS] + [(kind, "go to host memory") for kind in [*KINDS][1:]],
)
def test_an_interruption_at_any_step_cannot_be_seen(kind: str, way: str, tmp_path: Path) -> None:
    request, (make, interrupt) = ended_by_a_stop_string(**KINDS[kind]), WAYS[way]
    alone, fetched = undisturbed(request), 0
    for step in count(1):
        harness = make(Setup(num_blocks=64, max_num_batched_tokens=CHUNK), tmp_path / f"{step}")
        harness.add(request)
        for _ in range(step):
            harness.step()
        if not harness.scheduler.running:
            break
        interrupt(harness)
        harness.run(max_steps=1_000_000)  # most of them wait for the disk
        harness.close()
        assert answers(harness, request) == alone
        fetched += num_fetched(harness)
    assert alone[0].finish_reason is FinishReason.STOP
    num_tokens = max(len(answer.token_ids) for answer in alone)
    assert step == -(-len(PROMPT) // CHUNK) + num_tokens - 1 >= 29
    assert (fetched > 0) == way.startswith("go")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_interruption_at_every_step_cannot_be_seen(kind: str, way: str, tmp_path: Path) -> None:
    """The prompt is computed at once: in parts it would never be, where blocks are lost."""
    request, (make, interrupt) = ended_by_a_stop_string(**KINDS[kind]), WAYS[way]
    harness = make(Setup(num_blocks=64, max_num_batched_tokens=128), tmp_path)
    harness.add(request)

    while harness.scheduler.waiting or harness.scheduler.running:
        harness.step()
        if harness.scheduler.running:  # it may wait for the disk
            interrupt(harness)

    harness.close()
    assert answers(harness, request) == undisturbed(request)
    assert harness.scheduler.num_preemptions >= NUM_TOKENS - 1
    assert (num_fetched(harness) > 0) == way.startswith("go")
