"""A client that hangs up leaves nothing running, whatever it waited for."""

import asyncio
import random
import socket

import httpx
import pytest
from support.server import KEY, Server

pytestmark = [pytest.mark.server, pytest.mark.anyio]

LONG = {"model": "base", "prompt": "Hello", "max_tokens": 2000, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 2}


@pytest.fixture
def http(server: Server) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.AsyncClient(base_url=f"{server.url}/v1", headers=headers, timeout=60)


async def wait_running(server: Server, count: int) -> None:
    while server.metric("vllm:num_requests_running") < count:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("model", ["base", "red"])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("more", [{}, {"n": 3}, {"prompt": ["a", "b", "c"]}])
async def test_hanging_up_ends_the_request(
    server: Server, http: httpx.AsyncClient, model: str, streaming: bool, more: dict[str, object]
) -> None:
    before = server.metric("vllm:generation_tokens_total")
    body = {**LONG, "model": model, "stream": streaming, **more}
    async with http:
        call = asyncio.create_task(http.post("/completions", json=body))
        await wait_running(server, 3 if more else 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

        server.wait_idle()

        assert server.metric("vllm:generation_tokens_total") - before < 2000
        assert (await http.post("/completions", json=SHORT)).status_code == 200


async def test_hanging_up_in_the_queue_ends_the_wait(
    server: Server, http: httpx.AsyncClient
) -> None:
    async with http:
        body = {**LONG, "n": 16}
        running = asyncio.create_task(http.post("/completions", json=body))
        await wait_running(server, 16)
        queued = [
            asyncio.create_task(http.post("/completions", json={**LONG, "stream": streaming}))
            for streaming in (True, False)
        ]
        while server.metric("vllm:num_requests_waiting") < 2:
            await asyncio.sleep(0.01)
        for call in queued:
            call.cancel()
        while server.metric("vllm:num_requests_waiting"):
            await asyncio.sleep(0.01)

        assert server.metric("vllm:num_requests_running") == 16
        running.cancel()
        await asyncio.gather(running, *queued, return_exceptions=True)
    server.wait_idle()


async def test_fifty_calls_that_end_at_any_moment_leave_nothing(
    server: Server, http: httpx.AsyncClient
) -> None:
    chance = random.Random(0)

    async def cut_short(number: int) -> None:
        body = {**LONG, "max_tokens": 200, "stream": number % 2 == 0, "n": 1 + number % 3}
        call = asyncio.create_task(http.post("/completions", json=body))
        await asyncio.sleep(chance.random())
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    async with http:
        await asyncio.gather(*(cut_short(number) for number in range(50)))
        server.wait_idle(timeout=60)
        answers = [await http.post("/completions", json=SHORT) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [200, 200]


async def test_a_client_that_sends_half_a_request_harms_nobody(
    server: Server, http: httpx.AsyncClient
) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    with socket.create_connection((host, int(port))) as half:
        half.sendall(
            f"{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{".encode()
        )

        async with http:
            assert (await http.post("/completions", json=SHORT)).status_code == 200
    server.wait_idle()
