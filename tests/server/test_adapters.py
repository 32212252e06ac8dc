"""Adapters come and go beside traffic, whatever became of the requests that used them."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.server import Server

from loraplex.adapters.manifest import AdapterRef, Folder
from loraplex.engine.client import EngineClient
from loraplex.engine.errors import RequestRejected
from loraplex.engine.protocol import (
    FailureCode,
    FinishReason,
    GenerateRequest,
    RegisterAdapter,
    TokenEvent,
    UnregisterAdapter,
)
from loraplex.engine.sampling_params import SamplingParams

pytestmark = [pytest.mark.server, pytest.mark.anyio]


@contextlib.asynccontextmanager
async def beside(server: Server) -> AsyncIterator[EngineClient]:
    engine = server.engine_client()
    await engine.start()
    await asyncio.wait_for(engine.wait_ready(), 30)
    try:
        yield engine
    finally:
        await engine.close()
        server.wait_idle()
        assert server.metric("loraplex:adapters_registered") == 2


async def register(engine: EngineClient, folder: Path) -> AdapterRef:
    command = RegisterAdapter(
        request_id=uuid.uuid4().hex,
        tenant="t",
        adapter_id=uuid.uuid4().hex,
        source=Folder(str(folder)),
    )
    return (await engine.register_adapter(command)).ref


async def unregister(engine: EngineClient, ref: AdapterRef) -> None:
    command = UnregisterAdapter(request_id=uuid.uuid4().hex, adapter=ref)
    await asyncio.wait_for(engine.unregister_adapter(command), 10)


async def generate(engine: EngineClient, ref: AdapterRef, **sampling: object) -> list[TokenEvent]:
    request = GenerateRequest(
        request_id=uuid.uuid4().hex,
        tenant="t",
        namespace="t",
        prompt_token_ids=[5, 6, 7],
        sampling=SamplingParams(ignore_eos=True, **sampling),
        adapter=ref,
    )
    return [event async for event in engine.generate(request)]


async def test_an_adapter_leaves_after_requests_with_many_choices(
    server: Server, adapters: dict[str, Path]
) -> None:
    async with beside(server) as engine:
        ref = await register(engine, adapters["red"])
        await asyncio.gather(*(generate(engine, ref, n=16, max_tokens=4) for _ in range(3)))

        await unregister(engine, ref)


async def test_an_adapter_leaves_after_cancelled_and_refused_requests(
    server: Server, adapters: dict[str, Path]
) -> None:
    async with beside(server) as engine:
        ref = await register(engine, adapters["red"])
        calls = [asyncio.create_task(generate(engine, ref, n=4, max_tokens=1500)) for _ in range(3)]
        with pytest.raises(RequestRejected):
            await generate(engine, ref, stop_token_ids=(10**6,))
        await asyncio.sleep(0.2)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

        await unregister(engine, ref)


async def test_requests_that_run_or_wait_end_on_the_adapter_that_is_leaving(
    server: Server, adapters: dict[str, Path]
) -> None:
    async with beside(server) as engine:
        ref = await register(engine, adapters["blue"])
        alone = await generate(engine, ref, temperature=0, max_tokens=120)
        calls = [
            asyncio.create_task(generate(engine, ref, temperature=0, n=8, max_tokens=120))
            for _ in range(4)  # twice as many choices as run at once
        ]
        while server.metric("vllm:num_requests_waiting") == 0:
            await asyncio.sleep(0)

        await unregister(engine, ref)

        answers = await asyncio.gather(*calls)
        expected = "".join(event.text for event in alone)
        for events in answers:
            texts = ["".join(e.text for e in events if e.index == index) for index in range(8)]
            assert texts == [expected] * 8
            assert [event.finish_reason for event in events].count(FinishReason.LENGTH) == 8


async def test_an_adapter_that_has_left_cannot_be_called(
    server: Server, adapters: dict[str, Path]
) -> None:
    async with beside(server) as engine:
        ref = await register(engine, adapters["red"])
        await unregister(engine, ref)

        with pytest.raises(RequestRejected) as caught:
            await generate(engine, ref)

    assert caught.value.code is FailureCode.ADAPTER_NOT_FOUND
