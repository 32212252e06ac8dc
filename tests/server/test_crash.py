"""The engine is killed or stopped while the server is busy; callers see a pause, and then the same
answers as if nothing had happened."""

import asyncio
import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.server import KEY, Server, running_server

pytestmark = pytest.mark.server

NUM_STREAMS = 64
NUM_TOKENS = 200
ENDS = (signal.SIGKILL, signal.SIGSTOP)


@dataclass
class Aftermath:
    """What callers saw of an engine's end."""

    undisturbed: list[dict[str, Any]]
    disturbed: list[dict[str, Any]]
    meanwhile: list[httpx.Response]  # calls before the next engine was ready


@pytest.fixture(scope="module")
def crashing(
    tmp_path_factory: pytest.TempPathFactory, serve_options: list[str], adapters: dict[str, Path]
) -> Iterator[Server]:
    """A server of its own, whose adapters' folders vanish once it is ready."""
    folder = tmp_path_factory.mktemp("copies")
    options = [option for option in serve_options if not option.startswith("--adapter=")]
    for name, original in adapters.items():
        shutil.copytree(original, folder / name)
        options.append(f"--adapter={name}={folder / name}")
    options.append("--hang-timeout=2")
    with running_server(tmp_path_factory.mktemp("home"), *options) as server:
        shutil.rmtree(folder)
        yield server


@pytest.fixture(scope="module", params=ENDS, ids=[end.name for end in ENDS])
def aftermath(request: pytest.FixtureRequest, crashing: Server) -> Aftermath:
    return asyncio.run(end_engine(crashing, request.param))


async def end_engine(server: Server, number: signal.Signals) -> Aftermath:
    headers = {"authorization": f"Bearer {KEY}"}
    limits = httpx.Limits(max_connections=2 * NUM_STREAMS)
    async with httpx.AsyncClient(
        base_url=server.url, headers=headers, timeout=120, limits=limits
    ) as http:
        undisturbed = await asyncio.gather(*map(stream(http), range(NUM_STREAMS)))
        calls = [asyncio.create_task(stream(http)(i)) for i in range(NUM_STREAMS)]
        await all_taken_in(http, calls)
        engine = server.engine()
        engine.send_signal(number)
        while engine.is_running():
            await asyncio.sleep(0.01)
        while (await http.get("/health")).status_code == 200:  # until the server has noticed
            await asyncio.sleep(0.001)
        meanwhile = [await http.post("/v1/completions", json=body(0)), await http.get("/health")]
        return Aftermath(undisturbed, await asyncio.gather(*calls), meanwhile)


def body(number: int) -> dict[str, Any]:
    """Sampled and greedy, of the base model and of two adapters, with one choice and with two."""
    return {
        "model": ("base", "red", "blue")[number % 3],
        "prompt": f"Number {number} says",
        "max_tokens": NUM_TOKENS,
        "temperature": number % 2,
        "seed": number,
        "n": 1 + (number % 8 == 0),
        "frequency_penalty": 0.5 * (number % 5 == 0),
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def all_taken_in(http: httpx.AsyncClient, calls: list[asyncio.Task[Any]]) -> None:
    """Waits until the server has begun with every call; most of them have not ended then."""
    num_taken = 0
    while num_taken < len(calls):
        load = (await http.get("/load")).json()["server_load"]
        num_ended = sum(call.done() for call in calls)
        assert num_ended < len(calls) // 2
        num_taken = load + num_ended


def stream(http: httpx.AsyncClient) -> Any:
    async def read(number: int) -> dict[str, Any]:
        """The texts, ends and usages of one stream."""
        answer: dict[str, Any] = {"texts": ["", ""], "ends": [], "usages": []}
        async with http.stream("POST", "/v1/completions", json=body(number)) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    add(answer, json.loads(line.removeprefix("data: ")))
        return answer

    return read


def add(answer: dict[str, Any], chunk: dict[str, Any]) -> None:
    assert "error" not in chunk, chunk
    for choice in chunk["choices"]:
        answer["texts"][choice["index"]] += choice["text"]
        answer["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    if chunk["usage"]:
        answer["usages"].append(chunk["usage"]["completion_tokens"])


def test_every_stream_says_what_it_would_have_said(aftermath: Aftermath) -> None:
    assert len({answer["texts"][0] for answer in aftermath.undisturbed}) > NUM_STREAMS // 2
    assert aftermath.disturbed == aftermath.undisturbed


def test_every_stream_has_one_usage(aftermath: Aftermath) -> None:
    for number, answer in enumerate(aftermath.disturbed):
        choices = body(number)["n"]
        assert answer["usages"] == [choices * NUM_TOKENS]
        assert answer["ends"] == ["length"] * choices


def test_calls_between_two_engines_are_told_when_to_try_again(aftermath: Aftermath) -> None:
    for answer in aftermath.meanwhile:
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_unavailable"
    assert 1 <= int(aftermath.meanwhile[0].headers["retry-after"]) <= 60


def test_nothing_is_left_behind(aftermath: Aftermath, crashing: Server) -> None:
    crashing.wait_healthy()
    crashing.wait_idle()
