"""A stop lets answers finish, and tells everybody else."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from support.server import KEY, Server

pytestmark = [pytest.mark.server, pytest.mark.anyio]

LONG = {"model": "base", "prompt": "Hello", "max_tokens": 2000, "ignore_eos": True}


def listens(server: Server) -> bool:
    try:
        httpx.get(f"{server.url}/version")
    except httpx.TransportError:
        return False
    return True


async def test_what_does_not_finish_in_time_ends_with_an_error(
    tmp_path: Path, serve_options: list[str]
) -> None:
    server = Server(tmp_path, *serve_options, "--shutdown-timeout=0.2")
    server.wait_ready()
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=f"{server.url}/v1", headers=headers, timeout=60) as http:

        def call(**more: object) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(http.post("/completions", json={**LONG, **more}))

        calls = [call(n=8, stream=True), call(n=8)]
        while server.metric("vllm:num_requests_running") < 16:
            await asyncio.sleep(0.01)
        calls += [call(), call(stream=True)]
        while server.metric("vllm:num_requests_waiting") < 2:
            await asyncio.sleep(0.01)
        status = await asyncio.to_thread(server.stop)
        answers = await asyncio.gather(*calls)

    assert status == 0
    assert [answer.status_code for answer in answers] == [200, 503, 503, 503]
    assert {a.json()["error"]["code"] for a in answers[1:]} == {"engine_unavailable"}
    events = answers[0].text.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "engine_unavailable"
    assert not [event for event in events[:-1] if "error" in json.loads(event[6:])]
    assert "Traceback" not in "".join(server.log)


async def test_a_second_interrupt_ends_the_wait(tmp_path: Path, serve_options: list[str]) -> None:
    server = Server(tmp_path, *serve_options, "--shutdown-timeout=3600")
    server.wait_ready()
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=f"{server.url}/v1", headers=headers, timeout=60) as http:
        body = {**LONG, "stream": True, "n": 16}
        call = asyncio.create_task(http.post("/completions", json=body))
        while server.metric("vllm:num_requests_running") < 16:
            await asyncio.sleep(0.01)
        server.interrupt()
        while listens(server):
            await asyncio.sleep(0.01)
        server.interrupt()
        answer = await call
        status = await asyncio.to_thread(server.wait_exit)

    assert status == 0
    last = answer.text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_unavailable"
    assert "Traceback" not in "".join(server.log)
