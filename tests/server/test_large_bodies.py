"""A large body is its sender's own affair."""

import json
import threading
from typing import Any

import httpx
import pytest
from support.server import Server

pytestmark = pytest.mark.server

COMPLETION = {"model": "base", "prompt": "Hello", "max_tokens": 1}
MEGABYTE = 2**20


def post(server: Server, path: str, content: bytes) -> httpx.Response:
    with server.http() as http:
        headers = {"content-type": "application/json"}
        return http.post(f"/v1/{path}", content=content, headers=headers)


def filled(name: str, item: str, num_bytes: int = 4 * MEGABYTE) -> bytes:
    """A chat with a list of equal items in one of its parameters."""
    items = ",".join([item] * (num_bytes // (len(item) + 1)))
    chat = '{"model":"base","messages":[{"role":"user","content":"Hello"}],"max_tokens":1,'
    return f'{chat}"{name}":[{items}]}}'.encode()


@pytest.mark.parametrize(
    "content",
    [
        filled("messages", "1"),
        filled("messages", "{}"),
        filled("messages", '{"role":"user","content":"Hello"}'),
        filled("stop", '"x"'),
        filled("tools", "[]"),
        filled("x" * MEGABYTE, "[]"),
    ],
    ids=["numbers", "empty", "legal", "stop", "tools", "name"],
)
def test_a_large_body_gets_a_small_answer_while_others_are_served(
    server: Server, content: bytes
) -> None:
    answers: list[httpx.Response] = []
    sender = threading.Thread(
        target=lambda: answers.append(post(server, "chat/completions", content))
    )
    before = server.memory()
    sender.start()
    num_served = 0
    while sender.is_alive():
        assert httpx.get(f"{server.url}/version").status_code == 200
        num_served += 1
    sender.join()

    assert answers[0].status_code == 400
    assert len(answers[0].content) < 16_000
    assert num_served >= 3
    assert server.memory() - before < 200 * MEGABYTE


def test_what_says_nothing_may_be_large(server: Server) -> None:
    answer = post(server, "chat/completions", filled("metadata", "[]"))

    assert answer.status_code == 200


def test_many_token_ids_are_served(server: Server) -> None:
    prompts = [[number % 200 + 1 for number in range(first, first + 1000)] for first in range(30)]
    answer = post(server, "completions", json.dumps({**COMPLETION, "prompt": prompts}).encode())

    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == 30_000


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_text_that_can_never_fit_is_refused(server: Server, path: str) -> None:
    text = "word " * (3 * MEGABYTE)
    prompt = {"prompt": text, "messages": [{"role": "user", "content": text}]}
    name = "prompt" if path == "completions" else "messages"
    before = server.memory()

    answer = post(server, path, json.dumps({"model": "base", name: prompt[name]}).encode())

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert server.memory() - before < 300 * MEGABYTE


@pytest.mark.parametrize("token", [-1, 10**9, 10**30])
def test_many_token_ids_with_a_wrong_one_are_refused(server: Server, token: int) -> None:
    content = json.dumps({**COMPLETION, "prompt": [[1] * 30_000, [token]]}).encode()

    answer = post(server, "completions", content)

    assert answer.status_code == 400


@pytest.mark.parametrize("body", [{"model": "x" * MEGABYTE}, {"base_prompt": "x" * MEGABYTE}])
def test_a_long_name_is_not_said_back(server: Server, body: dict[str, Any]) -> None:
    answer = post(server, "completions", json.dumps({**COMPLETION, **body}).encode())

    assert answer.status_code == 404
    assert len(answer.content) < 1000
