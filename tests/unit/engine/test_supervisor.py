"""One engine process and its client: answers, faults, crashes, restarts."""

import asyncio
import contextlib
import os
import shlex
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest
import zmq
from support.engine import fake_engine

from loraplex.adapters.manifest import AdapterRef, Folder
from loraplex.engine.client import EngineClient
from loraplex.engine.config import EngineConfig, HangLimits
from loraplex.engine.errors import EngineUnavailable, RequestRejected, StartRefused
from loraplex.engine.protocol import (
    BasePromptRef,
    FailureCode,
    GenerateRequest,
    PublishBasePrompt,
    RegisterAdapter,
    RetireBasePrompt,
    StartProgress,
    TenantShare,
    TokenEvent,
    UnregisterAdapter,
)
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.supervisor import EngineSupervisor, RestartPolicy

pytestmark = pytest.mark.anyio

COMMAND = (sys.executable, "-P", fake_engine.__file__)
HASTY = RestartPolicy(max_failed_starts=2, delay=0.01)
FOREVER = 10_000_000

Hang = Callable[[EngineClient, EngineSupervisor], Awaitable[None]]
Prepare = Callable[[EngineClient], Awaitable[bool]]


def request(
    request_id: str = "r", prompt: list[int] | None = None, max_tokens: int = 3, n: int = 1
) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        tenant="t",
        namespace="ns",
        prompt_token_ids=prompt or [10],
        sampling=SamplingParams(max_tokens=max_tokens, n=n),
    )


@contextlib.asynccontextmanager
async def engine(
    folder: Path,
    model: str = "fake",
    prepare: Prepare | None = None,
    policy: RestartPolicy = HASTY,
    limits: HangLimits | None = None,
) -> AsyncIterator[tuple[EngineClient, EngineSupervisor]]:
    client = EngineClient(f"ipc://{folder}/engine.sock", prepare)
    supervisor = EngineSupervisor(
        EngineConfig(model=model, adapter_store=str(folder)), client, policy, limits, COMMAND
    )
    await client.start()
    running = asyncio.create_task(supervisor.run())
    try:
        await asyncio.wait_for(client.wait_ready(), 30)
        yield client, supervisor
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.close()


async def collect(client: EngineClient, *wanted: GenerateRequest) -> list[TokenEvent]:
    return [event async for event in client.generate(*wanted)]


async def idle(client: EngineClient) -> None:
    """Waits until the engine runs nothing."""
    while (await client.stats()).num_running:
        await asyncio.sleep(0.01)


async def test_tokens_come_back_until_each_choice_has_ended(tmp_path: Path) -> None:
    async with engine(tmp_path) as (client, _):
        events = await collect(client, request(n=2))

    assert [(event.index, event.text) for event in events] == [
        (0, "11 "),
        (1, "11 "),
        (0, "12 "),
        (1, "12 "),
        (0, "13 "),
        (1, "13 "),
    ]


async def test_requests_run_side_by_side_for_several_clients(tmp_path: Path) -> None:
    async with engine(tmp_path) as (client, _):
        other = EngineClient(client.address)
        await other.start()
        await asyncio.wait_for(other.wait_ready(), 10)
        outputs = await asyncio.gather(
            *(collect(client, request(f"a{i}", [100 + i])) for i in range(4)),
            *(collect(other, request(f"b{i}", [200 + i])) for i in range(4)),
        )
        await other.close()

    firsts = [events[0].token_ids[0] for events in outputs]
    assert firsts == [101, 102, 103, 104, 201, 202, 203, 204]


async def test_one_stream_serves_several_requests_to_the_end_of_each(tmp_path: Path) -> None:
    async with engine(tmp_path) as (client, _):
        short, long = request("short", max_tokens=1), request("long", max_tokens=4)
        events = await collect(client, short, long)

    lengths = Counter(event.request_id for event in events)
    assert lengths == {"short": 1, "long": 4}


async def test_a_stream_that_fails_on_one_request_aborts_the_others(tmp_path: Path) -> None:
    async with engine(tmp_path) as (client, _):
        forever, bad = request("a", max_tokens=FOREVER), request("b", [fake_engine.REFUSED])
        with pytest.raises(RequestRejected):
            await collect(client, forever, bad)

        await asyncio.wait_for(idle(client), 10)


async def test_a_refused_request_tells_why_and_harms_nobody(tmp_path: Path) -> None:
    async with engine(tmp_path) as (client, _):
        with pytest.raises(RequestRejected) as caught:
            await collect(client, request("bad", [fake_engine.REFUSED]))

        assert (caught.value.code, caught.value.param) == (FailureCode.INVALID_REQUEST, "prompt")
        assert caught.value.faults == ["a", "b"]
        assert len(await collect(client, request("good"))) == 3


async def test_a_fault_in_one_request_fails_that_request_only(tmp_path: Path) -> None:
    async with engine(tmp_path) as (client, supervisor):
        pid = supervisor.pid
        with pytest.raises(RequestRejected) as caught:
            await collect(client, request("bad", [fake_engine.BROKEN]))

        assert caught.value.code is FailureCode.INTERNAL
        assert "Traceback" not in caught.value.message
        assert supervisor.pid == pid


async def test_leaving_a_stream_aborts_its_request(tmp_path: Path) -> None:
    async with engine(tmp_path) as (client, _):
        async with contextlib.aclosing(client.generate(request(max_tokens=FOREVER))) as events:
            await anext(events)

        await asyncio.wait_for(idle(client), 10)
        assert (await client.stats()).num_preemptions == 1


async def test_cancelling_a_reader_aborts_its_request(tmp_path: Path) -> None:
    async with engine(tmp_path) as (client, _):
        reader = asyncio.create_task(collect(client, request(max_tokens=FOREVER)))
        while not (await client.stats()).num_running:
            await asyncio.sleep(0.01)
        reader.cancel()

        await asyncio.wait_for(idle(client), 10)


async def test_a_client_that_goes_without_a_word_leaves_nothing_running(tmp_path: Path) -> None:
    async with engine(tmp_path) as (client, _):
        other = EngineClient(client.address)
        await other.start()
        await asyncio.wait_for(other.wait_ready(), 10)
        reader = asyncio.create_task(collect(other, request(max_tokens=FOREVER)))
        while not (await client.stats()).num_running:
            await asyncio.sleep(0.01)
        await other.close()

        with pytest.raises(EngineUnavailable):
            await reader
        await asyncio.wait_for(idle(client), 10)


@pytest.mark.parametrize("prompt", [fake_engine.FATAL, fake_engine.DEADLY])
async def test_when_the_engine_ends_all_its_requests_fail_and_the_next_one_serves(
    tmp_path: Path, prompt: int
) -> None:
    prepared: list[int] = []

    async def prepare(client: EngineClient) -> bool:
        assert client.info is not None
        prepared.append(client.info.pid)
        return True

    async with engine(tmp_path, prepare=prepare) as (client, _):
        others = [
            asyncio.create_task(collect(client, request(f"o{i}", max_tokens=FOREVER)))
            for i in range(3)
        ]
        while (await client.stats()).num_running < 3:
            await asyncio.sleep(0.01)
        ends = await asyncio.gather(
            collect(client, request("bad", [prompt])), *others, return_exceptions=True
        )
        assert [type(end) for end in ends] == [EngineUnavailable] * 4

        await asyncio.wait_for(client.wait_ready(), 30)
        assert len(await collect(client, request("again"))) == 3

    assert len(set(prepared)) == 2


async def stop(client: EngineClient, supervisor: EngineSupervisor) -> None:
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGSTOP)


async def loop_endlessly(client: EngineClient, supervisor: EngineSupervisor) -> None:
    with contextlib.suppress(EngineUnavailable):
        await collect(client, request("endless", [fake_engine.ENDLESS]))


async def deadlock(client: EngineClient, supervisor: EngineSupervisor) -> None:
    with contextlib.suppress(EngineUnavailable):
        await collect(client, request("deadlocked", [fake_engine.DEADLOCKED]))


@pytest.mark.parametrize("hang", [stop, loop_endlessly, deadlock])
async def test_an_engine_that_hangs_is_replaced(tmp_path: Path, hang: Hang) -> None:
    limits = HangLimits(hang_timeout=2, step_timeout=2)
    async with engine(tmp_path, limits=limits) as (client, supervisor):
        hung = supervisor.pid
        hanging = asyncio.create_task(hang(client, supervisor))
        while client.is_alive:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(client.wait_ready(), 30)
        await hanging

        assert supervisor.pid != hung
        assert supervisor.is_responsive
        assert len(await collect(client, request("again"))) == 3


async def test_a_stopped_engine_is_doubted_before_it_is_killed(tmp_path: Path) -> None:
    limits = HangLimits(hang_timeout=4, step_timeout=4)
    async with engine(tmp_path, limits=limits) as (client, supervisor):
        await stop(client, supervisor)
        while supervisor.is_responsive:
            await asyncio.sleep(0.01)

        assert client.is_alive


async def replace(client: EngineClient, supervisor: EngineSupervisor) -> None:
    """The engine ends, and the next one is ready."""
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    while client.is_alive:
        await asyncio.sleep(0.01)
    await asyncio.wait_for(client.wait_ready(), 30)


def fork_server_of(supervisor: EngineSupervisor) -> psutil.Process:
    return psutil.Process(supervisor.pid).parent() or pytest.fail("the engine is an orphan")


async def test_engines_are_forks_of_one_process(tmp_path: Path) -> None:
    async with engine(tmp_path) as (client, supervisor):
        first, fork_server = supervisor.pid, fork_server_of(supervisor)
        await replace(client, supervisor)

        assert supervisor.pid != first
        assert fork_server_of(supervisor) == fork_server != psutil.Process()
        assert len(await collect(client, request())) == 3


async def test_an_engine_ends_with_its_fork_server_and_is_replaced(tmp_path: Path) -> None:
    async with engine(tmp_path) as (client, supervisor):
        first, fork_server = supervisor.pid, fork_server_of(supervisor)
        fork_server.kill()
        while client.is_alive:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(client.wait_ready(), 30)

        assert supervisor.pid != first
        assert fork_server_of(supervisor) != fork_server
        assert len(await collect(client, request())) == 3


async def test_a_fork_server_that_hangs_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.engine.supervisor.NOTICE_SECONDS", 0.5)
    limits = HangLimits(hang_timeout=2, step_timeout=2)
    async with engine(tmp_path, limits=limits) as (client, supervisor):
        fork_server = fork_server_of(supervisor)
        fork_server.suspend()
        await replace(client, supervisor)

        assert fork_server_of(supervisor) != fork_server
        assert len(await collect(client, request())) == 3


async def test_a_fork_server_ends_with_its_supervisor(tmp_path: Path) -> None:
    async with engine(tmp_path) as (_, supervisor):
        fork_server = fork_server_of(supervisor)

    assert not fork_server.is_running()


async def test_an_engine_that_cannot_be_forked_is_started_anew_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import sys; from loraplex.engine.process import fork_server; "
        "fork_server.CAN_FORK = False; "
        "from support.engine import fake_engine; sys.exit(fake_engine.main())"
    )
    monkeypatch.setattr(sys.modules[__name__], "COMMAND", (sys.executable, "-c", program))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    async with engine(tmp_path) as (client, supervisor):
        first = supervisor.pid
        await replace(client, supervisor)

        assert supervisor.pid != first
        assert fork_server_of(supervisor) == psutil.Process()
        assert len(await collect(client, request())) == 3


async def test_an_error_of_the_supervisor_itself_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = tmp_path / "engine"
    client = EngineClient(f"ipc://{tmp_path}/engine.sock")
    await client.start()
    supervisor = EngineSupervisor(
        EngineConfig(model="fake", adapter_store=""),
        client,
        RestartPolicy(delay_after_error=0.01),
        command=[str(command)],
    )
    running = asyncio.create_task(supervisor.run())
    while caplog.text.count("could not be supervised") < 5:  # more than failed starts may be
        await asyncio.sleep(0.01)

    command.symlink_to(write_script(tmp_path / "script", *COMMAND))
    await asyncio.wait_for(client.wait_ready(), 30)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await client.close()


def write_script(path: Path, *command: str) -> Path:
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o700)
    return path


async def test_the_eighth_restart_in_a_row_waits_no_longer_than_the_first(tmp_path: Path) -> None:
    async with engine(tmp_path, policy=RestartPolicy()) as (client, supervisor):
        for _ in range(8):
            assert supervisor.pid is not None
            os.kill(supervisor.pid, signal.SIGKILL)
            while client.is_alive:
                await asyncio.sleep(0.01)
            await asyncio.wait_for(client.wait_ready(), 12)  # a start takes a second or so


async def test_a_message_of_any_form_leaves_the_engine_alive(tmp_path: Path) -> None:
    async with engine(tmp_path) as (client, supervisor):
        pid = supervisor.pid
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.connect(client.address)
            for frames in ([b"a", b"b"], [b""], [b"a", b"b", b"c"], [b"\x91" * 10_000], [b"\xc1"]):
                stranger.send_multipart(frames)
            await asyncio.sleep(0.5)

        assert len(await collect(client, request())) == 3
        assert supervisor.pid == pid


async def test_requests_are_refused_until_the_restarted_engine_is_prepared(
    tmp_path: Path,
) -> None:
    gate = asyncio.Event()
    gate.set()

    async def prepare(client: EngineClient) -> bool:
        return await gate.wait()

    async with engine(tmp_path, prepare=prepare) as (client, supervisor):
        gate.clear()
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        while client.is_alive:
            await asyncio.sleep(0.01)
        while client.info is None:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineUnavailable, match="starting"):
            await collect(client, request("early"))
        gate.set()

        await asyncio.wait_for(client.wait_ready(), 30)
        assert len(await collect(client, request("late"))) == 3


async def test_adapters_come_and_go(tmp_path: Path) -> None:
    async with engine(tmp_path) as (client, _):
        info = await client.register_adapter(
            RegisterAdapter(request_id="a", tenant="t", adapter_id="x", source=Folder("p"))
        )
        await client.unregister_adapter(UnregisterAdapter(request_id="b", adapter=info.ref))

    assert info.ref == AdapterRef(tenant="t", adapter_id="x", digest="d")


async def test_progress_is_told_while_the_engine_starts(tmp_path: Path) -> None:
    told: list[StartProgress] = []
    client = EngineClient(f"ipc://{tmp_path}/engine.sock", on_progress=told.append)
    await client.start()
    supervisor = EngineSupervisor(
        EngineConfig(model="slow", adapter_store=""), client, HASTY, command=COMMAND
    )
    running = asyncio.create_task(supervisor.run())
    await asyncio.wait_for(client.wait_ready(), 30)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await client.close()

    assert set(told) == {StartProgress("Counting", 1, 2)}


@pytest.mark.parametrize(
    ("model", "reason"),
    [("refused", "^3 blocks are needed, 2 fit$"), ("crashing", "2 times in a row.* status 7")],
)
async def test_an_engine_that_cannot_start_is_given_up_with_its_reason(
    tmp_path: Path, model: str, reason: str
) -> None:
    client = EngineClient(f"ipc://{tmp_path}/engine.sock")
    await client.start()
    supervisor = EngineSupervisor(
        EngineConfig(model=model, adapter_store=""), client, HASTY, command=COMMAND
    )

    with pytest.raises(StartRefused, match=reason):
        await asyncio.wait_for(supervisor.run(), 30)
    await client.close()


async def test_the_engine_ends_with_its_supervisor(tmp_path: Path) -> None:
    async with engine(tmp_path) as (_, supervisor):
        pid = supervisor.pid
        assert pid is not None

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_base_prompts_come_and_go(tmp_path: Path) -> None:
    async with engine(tmp_path) as (client, _):
        info = await client.publish_base_prompt(
            PublishBasePrompt(request_id="a", prompt_id="p", version=3, token_ids=[5, 6])
        )
        await client.retire_base_prompt(
            RetireBasePrompt(request_id="b", prompt_id=info.ref.prompt_id, version=info.ref.version)
        )

    assert (info.ref, info.num_tokens) == (BasePromptRef(prompt_id="p", version=3), 2)


async def test_shares_and_the_block_map_cross_the_process_border(tmp_path: Path) -> None:
    async with engine(tmp_path) as (client, _):
        await client.set_tenant_shares([TenantShare("a", floor=2), TenantShare("b", floor=3)])
        with pytest.raises(RequestRejected) as caught:
            await client.set_tenant_shares([TenantShare("a", floor=9)])

        found = await client.block_map()

    assert caught.value.faults == ["a asks too much"]
    assert [(found.owners[run.owner], run.count) for run in found.runs] == [("a", 2), ("b", 3)]
