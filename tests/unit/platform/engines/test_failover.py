"""Calls outlive their engine: a pause, no error, the same tokens; but for the one that ends it."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from support.engine import fake_engine

from loraplex.engine.client import SENT_AT_ONCE, EngineClient
from loraplex.engine.config import EngineConfig, HangLimits
from loraplex.engine.errors import EngineUnavailable, RequestRejected
from loraplex.engine.protocol import FailureCode, FinishReason, GenerateRequest, TokenEvent
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.supervisor import EngineSupervisor, RestartPolicy
from loraplex.platform.engines.failover import Failover, FailoverStats

pytestmark = pytest.mark.anyio

COMMAND = (sys.executable, "-P", fake_engine.__file__)
LONG = 1000  # tokens, a millisecond each and more
FIRST_TOKENS = (100, 200, 300, 400, 500, 600)


class Town:
    """A supervised engine, and those who call it."""

    def __init__(self, client: EngineClient, supervisor: EngineSupervisor) -> None:
        self.client = client
        self.failover = Failover(client)
        self._supervisor = supervisor

    def call(self, *requests: GenerateRequest) -> asyncio.Task[list[TokenEvent]]:
        return asyncio.create_task(self._collect(requests))

    async def running(self, count: int) -> None:
        """Waits until so many requests run."""
        while not self.client.is_alive or (await self.client.stats()).num_running < count:
            await asyncio.sleep(0.01)

    def send(self, number: int) -> None:
        """A signal, to the engine's process."""
        assert self._supervisor.pid is not None
        os.kill(self._supervisor.pid, number)

    async def _collect(self, requests: tuple[GenerateRequest, ...]) -> list[TokenEvent]:
        return [event async for event in self.failover.generate(*requests)]


@contextlib.asynccontextmanager
async def a_town(folder: Path) -> AsyncIterator[Town]:
    client = EngineClient(f"ipc://{folder}/engine.sock")
    supervisor = EngineSupervisor(
        EngineConfig(model="fake", adapter_store=""),
        client,
        RestartPolicy(delay=0.01),
        HangLimits(hang_timeout=2, step_timeout=2),
        COMMAND,
    )
    await client.start()
    running = asyncio.create_task(supervisor.run())
    try:
        await asyncio.wait_for(client.wait_ready(), 30)
        yield Town(client, supervisor)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.close()


def request(
    last: int, request_id: str | None = None, max_tokens: int = LONG, n: int = 1
) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id or f"r{last}",
        tenant="t",
        namespace="ns",
        prompt_token_ids=[last],
        sampling=SamplingParams(max_tokens=max_tokens, n=n, seed=1),
    )


def tokens(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def assert_whole(events: list[TokenEvent], last: int, count: int = LONG) -> None:
    assert tokens(events) == list(range(last + 1, last + 1 + count))
    assert [event.finish_reason for event in events[:-1]] == [None] * (count - 1)
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == count


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
async def test_an_engines_end_is_a_pause(tmp_path: Path, number: int) -> None:
    async with a_town(tmp_path) as town:
        calls = [town.call(request(last)) for last in FIRST_TOKENS]
        await town.running(len(calls))
        town.send(number)
        answers = await asyncio.wait_for(asyncio.gather(*calls), 60)

        assert town.client.times_ready == 2
        assert town.failover.stats == FailoverStats(moves=len(calls))
    for last, events in zip(FIRST_TOKENS, answers, strict=True):
        assert_whole(events, last)


async def test_a_call_of_several_prompts_and_choices_moves_as_one(tmp_path: Path) -> None:
    async with a_town(tmp_path) as town:
        short, wide = request(100, max_tokens=5), request(200, n=2)
        call = town.call(short, wide)
        await town.running(1)
        town.send(signal.SIGKILL)
        events = await asyncio.wait_for(call, 60)

    assert_whole([event for event in events if event.request_id == "r100"], 100, 5)
    for index in (0, 1):
        own = [e for e in events if e.request_id == "r200" and e.index == index]
        assert_whole(own, 200)


async def test_two_moves_are_all(tmp_path: Path) -> None:
    async with a_town(tmp_path) as town:
        call = town.call(request(100, max_tokens=10_000_000))
        for _ in range(3):
            await town.running(1)
            await asyncio.sleep(0.2)  # it shows that it is innocent
            town.send(signal.SIGKILL)
            while town.client.is_alive:
                await asyncio.sleep(0.01)

        with pytest.raises(EngineUnavailable, match="engine stopped"):
            await asyncio.wait_for(call, 60)


@pytest.mark.parametrize(
    "poison",
    [fake_engine.FATAL, fake_engine.DEADLY, fake_engine.ENDLESS, fake_engine.LATE],
    ids=["raises", "kills", "loops", "kills later"],
)
async def test_who_ends_two_engines_fails_alone_and_is_not_tried_again(
    tmp_path: Path, poison: int
) -> None:
    async with a_town(tmp_path) as town:
        calls = [town.call(request(last)) for last in FIRST_TOKENS]
        await town.running(len(calls))
        bad = town.call(request(poison))
        answers = await asyncio.wait_for(asyncio.gather(bad, *calls, return_exceptions=True), 120)
        with pytest.raises(RequestRejected, match="not tried again") as again:
            await town.call(request(poison, "again"))

        assert town.client.times_ready == 3
        assert town.failover.stats.quarantined == 1
    assert isinstance(answers[0], RequestRejected), answers[0]
    assert answers[0].code is again.value.code is FailureCode.REQUEST_QUARANTINED
    for last, events in zip(FIRST_TOKENS, answers[1:], strict=True):
        assert isinstance(events, list), events
        assert_whole(events, last)


async def test_poison_that_is_sent_again_meanwhile_ends_no_third_engine(tmp_path: Path) -> None:
    async with a_town(tmp_path) as town:
        good = town.call(request(100))
        await town.running(1)
        bad = [town.call(request(fake_engine.DEADLY, f"bad{i}")) for i in range(3)]
        answers = await asyncio.wait_for(asyncio.gather(*bad, return_exceptions=True), 60)
        assert_whole(await asyncio.wait_for(good, 60), 100)

        assert town.client.times_ready == 3
    assert {type(answer) for answer in answers} == {RequestRejected}


async def test_a_refused_request_is_no_suspect(tmp_path: Path) -> None:
    async with a_town(tmp_path) as town:
        with pytest.raises(RequestRejected, match="refused"):
            await town.call(request(fake_engine.REFUSED))
        town.send(signal.SIGKILL)
        while town.client.is_alive:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(town.client.wait_ready(), 30)

        assert_whole(await town.call(request(100, max_tokens=3)), 100, 3)


async def test_who_calls_while_there_is_no_engine_is_told_when_to_try_again(
    tmp_path: Path,
) -> None:
    async with a_town(tmp_path) as town:
        town.send(signal.SIGKILL)
        while town.client.is_alive:
            await asyncio.sleep(0.001)
        with pytest.raises(EngineUnavailable, match="starting") as caught:
            await town.call(request(100))

    assert 1 <= caught.value.retry_after <= 10


async def test_other_tasks_run_while_many_long_prompts_are_sent(tmp_path: Path) -> None:
    num_turns = 0

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    async with a_town(tmp_path) as town:
        long = [5] * 2000 + [100]
        requests = [
            msgspec.structs.replace(request(number, max_tokens=1), prompt_token_ids=long)
            for number in range(200)
        ]
        counting = asyncio.create_task(count_turns())
        await town.client._send_all(requests)
        counting.cancel()

    assert num_turns >= 200 * 2001 // (SENT_AT_ONCE + 2001) - 1


async def test_no_call_waits_for_an_engine_that_is_given_up(tmp_path: Path) -> None:
    async with a_town(tmp_path) as town:
        call = town.call(request(100))
        await town.running(1)
        town.client.give_up()
        town.send(signal.SIGKILL)

        with pytest.raises(EngineUnavailable):
            await asyncio.wait_for(call, 10)


async def test_who_leaves_during_the_pause_leaves_nothing_behind(tmp_path: Path) -> None:
    async with a_town(tmp_path) as town:
        leaving, staying = town.call(request(100)), town.call(request(200))
        await town.running(2)
        town.send(signal.SIGKILL)
        while town.client.is_alive:
            await asyncio.sleep(0.001)
        leaving.cancel()

        assert_whole(await asyncio.wait_for(staying, 60), 200)
        assert leaving.cancelled()
        assert (await town.client.stats()).num_running == 0
