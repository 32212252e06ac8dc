"""A tenant's open choices are limited, and given back whichever way a call ends."""

from pathlib import Path

import httpx
import pytest
from openai import OpenAI, RateLimitError
from support.server import KEY, running_server

pytestmark = pytest.mark.server

LONG = {"model": "base", "prompt": "Hello", "max_tokens": 2000}


def test_a_call_beyond_the_limit_is_told_to_wait_until_another_ends(
    tmp_path: Path, serve_options: list[str]
) -> None:
    with running_server(tmp_path, *serve_options, "--max-open-choices=2") as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        long = client.completions.create(**LONG, n=2, stream=True, extra_body={"ignore_eos": True})
        next(iter(long))

        with pytest.raises(RateLimitError, match="may have at most 2 at once") as refusal:
            client.completions.create(model="base", prompt="Hello", max_tokens=1)

        assert refusal.value.response.headers["retry-after"] == "1"
        long.close()
        server.wait_idle()
        assert client.completions.create(model="base", prompt="Hello", max_tokens=1).choices


def test_a_stream_beyond_the_limit_gets_its_status_before_it_begins(
    tmp_path: Path, serve_options: list[str]
) -> None:
    with running_server(tmp_path, *serve_options, "--max-open-choices=2") as server:
        headers = {"authorization": f"Bearer {KEY}"}

        answer = httpx.post(
            f"{server.url}/v1/completions", json={**LONG, "n": 3, "stream": True}, headers=headers
        )

        assert answer.status_code == 429
