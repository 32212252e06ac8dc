"""The engine is killed once; the API tells its callers, starts another and serves on."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI
from support.server import KEY, Server, running_server

pytestmark = pytest.mark.server

LONG = {"model": "red", "prompt": "Hello", "max_tokens": 2000, "ignore_eos": True}


@dataclass
class Aftermath:
    """What callers saw of one crash."""

    before: dict[str, str]  # greedy texts by model
    streams: list[httpx.Response]  # calls that were under way
    whole: list[httpx.Response]
    official: openai.APIError  # the same, in the official client's stream
    meanwhile: list[httpx.Response]  # calls before the next engine was ready
    after: dict[str, str]


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
    with running_server(tmp_path_factory.mktemp("home"), *options) as server:
        shutil.rmtree(folder)
        yield server


@pytest.fixture(scope="module")
def aftermath(crashing: Server) -> Aftermath:
    return asyncio.run(crash(crashing))


async def crash(server: Server) -> Aftermath:
    headers = {"authorization": f"Bearer {KEY}"}
    with server.client() as client:
        before = texts(client)
        official = client.completions.create(
            model="base", prompt="Hello", max_tokens=2000, stream=True, extra_body=LONG
        )
        next(iter(official))
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as http:
            calls = [
                asyncio.create_task(http.post("/v1/completions", json={**LONG, "stream": stream}))
                for stream in (True, True, False, False)
            ]
            while server.metric("vllm:num_requests_running") < 5:
                await asyncio.sleep(0.01)
            server.engine().kill()
            answers = [await call for call in calls]
            meanwhile = [
                await http.post("/v1/completions", json={**LONG, "stream": stream})
                for stream in (True, False)
            ]
            meanwhile.append(await http.get("/health"))
        with pytest.raises(openai.APIError) as caught:
            list(official)
        server.wait_healthy()
        after = texts(client)
    return Aftermath(before, answers[:2], answers[2:], caught.value, meanwhile, after)


def texts(client: OpenAI) -> dict[str, str]:
    models = [model.id for model in client.models.list()]
    answers = {
        model: client.completions.create(
            model=model, prompt="The quick", temperature=0, extra_body={"ignore_eos": True}
        )
        for model in models
    }
    return {model: answer.choices[0].text for model, answer in answers.items()}


def test_calls_under_way_end_with_a_503(aftermath: Aftermath) -> None:
    for answer in aftermath.whole:
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_unavailable"
        assert "retry-after" in answer.headers


def test_streams_under_way_end_with_an_error_event(aftermath: Aftermath) -> None:
    for stream in aftermath.streams:
        *_, last = stream.text.strip().split("\n\n")
        assert stream.status_code == 200
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_unavailable"
        assert "[DONE]" not in stream.text


def test_the_official_client_raises_the_error_of_a_stream(aftermath: Aftermath) -> None:
    assert "engine stopped" in aftermath.official.message


def test_calls_between_two_engines_get_a_503(aftermath: Aftermath) -> None:
    assert [answer.status_code for answer in aftermath.meanwhile] == [503, 503, 503]


def test_the_next_engine_serves_base_and_adapters_as_the_first_did(
    aftermath: Aftermath, crashing: Server
) -> None:
    assert len(set(aftermath.before.values())) == 3
    assert aftermath.after == aftermath.before
    crashing.wait_idle()
