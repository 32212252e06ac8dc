"""Whatever a caller sends: a clear OpenAI error object, and a server that goes on."""

import json
from collections.abc import Iterator

import httpx
import openai
import pytest
from openai import OpenAI
from support.server import Server

pytestmark = pytest.mark.server

MESSAGES = [{"role": "user", "content": "Hello there"}]
PROMPT = {"model": "base", "prompt": "Hello", "max_tokens": 2}
CHAT = {"model": "base", "messages": MESSAGES, "max_tokens": 2}


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    """Afterwards, the server must still answer."""
    with server.http() as http:
        yield http
        assert http.post("/v1/completions", json=PROMPT).status_code == 200


def error_of(response: httpx.Response) -> dict[str, object]:
    """The error object, complete and without anything of the server's inside."""
    error = json.loads(response.text)["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert not any(word in response.text for word in ("Traceback", "/src/", ".py", "pydantic"))
    assert response.headers["x-request-id"].startswith("req_")
    return error


def refused(http: httpx.Client, body: object, status: int = 400) -> dict[str, object]:
    """Posts to the route that the body is for."""
    route = "chat/completions" if isinstance(body, dict) and "messages" in body else "completions"
    response = http.post(f"/v1/{route}", json=body)
    assert response.status_code == status, response.text
    return error_of(response)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**PROMPT, "temperature": 3}, "temperature"),
        ({**PROMPT, "temperature": "hot"}, "temperature"),
        ({**PROMPT, "top_p": 0}, "top_p"),
        ({**PROMPT, "top_k": -2}, "top_k"),
        ({**PROMPT, "min_p": 1.5}, "min_p"),
        ({**PROMPT, "n": 0}, "n"),
        ({**PROMPT, "n": 1000}, "n"),
        ({**PROMPT, "n": 17}, "n"),  # more than run at once
        ({**PROMPT, "n": 1.5}, "n"),
        ({**PROMPT, "max_tokens": 0}, "max_tokens"),
        ({**PROMPT, "max_tokens": True}, "max_tokens"),
        ({**PROMPT, "max_tokens": 10**30}, "max_tokens"),
        ({**PROMPT, "min_tokens": 5}, "min_tokens"),
        ({**PROMPT, "repetition_penalty": 0}, "repetition_penalty"),
        ({**PROMPT, "presence_penalty": 2.1}, "presence_penalty"),
        ({**PROMPT, "seed": 2**70}, "seed"),
        ({**PROMPT, "priority": 10**9}, "priority"),
        ({**PROMPT, "stop": [""]}, "stop"),
        ({**PROMPT, "stop": ["x"] * 17}, "stop"),
        ({**PROMPT, "stop": 7}, "stop"),
        ({**PROMPT, "stop_token_ids": [320]}, "stop_token_ids"),
        ({**PROMPT, "stop_token_ids": [10**30]}, "stop_token_ids"),
        ({**PROMPT, "stop_token_ids": ["a"]}, "stop_token_ids"),
        ({**PROMPT, "logit_bias": {"320": 1}}, "logit_bias"),
        ({**PROMPT, "logit_bias": {"x": 1}}, "logit_bias"),
        ({**PROMPT, "logit_bias": {"1": 101}}, "logit_bias"),
        ({**PROMPT, "logit_bias": [1]}, "logit_bias"),
        ({**PROMPT, "logprobs": 21}, "logprobs"),
        ({**PROMPT, "best_of": 3}, "best_of"),
        ({**PROMPT, "suffix": "after"}, "suffix"),
        ({**PROMPT, "stream_options": {"include_usage": True}}, "stream_options"),
        ({**PROMPT, "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({**PROMPT, "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({**PROMPT, "guided_regex": "foo**"}, "guided_regex"),
        ({**PROMPT, "structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({**PROMPT, "lora_request": {}}, "lora_request"),
        ({**PROMPT, "tenant": "another"}, "tenant"),
        ({**PROMPT, "response_format": {"type": "json_object"}}, "response_format"),
        ({**PROMPT, "model": None}, "model"),
        ({**PROMPT, "model": 3}, "model"),
        ({"prompt": "Hello"}, "model"),
        ({"model": "base"}, "prompt"),
        ({**PROMPT, "prompt": None}, "prompt"),
        ({**PROMPT, "prompt": []}, "prompt"),
        ({**PROMPT, "prompt": [[]]}, "prompt"),
        ({**PROMPT, "prompt": [[5], []]}, "prompt"),
        ({**PROMPT, "prompt": [5, -1]}, "prompt"),
        ({**PROMPT, "prompt": [5, 320]}, "prompt"),
        ({**PROMPT, "prompt": [5, 10**30]}, "prompt"),
        ({**PROMPT, "prompt": [5, "x"]}, "prompt"),
        ({**PROMPT, "prompt": ["x", 5]}, "prompt"),
        ({**PROMPT, "prompt": [5, True]}, "prompt"),
        ({**PROMPT, "prompt": [5.0]}, "prompt"),
        ({**PROMPT, "prompt": {"a": 1}}, "prompt"),
        ({**PROMPT, "prompt": ["x"] * 1025}, "prompt"),
        ({**CHAT, "messages": []}, "messages"),
        ({**CHAT, "messages": "hi"}, "messages"),
        ({**CHAT, "messages": [{}]}, "messages.0.role"),
        ({**CHAT, "messages": [{"role": "user"}]}, "messages.0.content"),
        ({**CHAT, "messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({**CHAT, "messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({**CHAT, "messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        (
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
        ),
        (
            {**CHAT, "messages": [{**MESSAGES[0], "tool_calls": [{"id": "x"}]}]},
            "messages.0.tool_calls",
        ),
        ({**CHAT, "tools": [{"type": "function"}]}, "tools"),
        ({**CHAT, "tool_choice": "required"}, "tool_choice"),
        ({**CHAT, "functions": [{"name": "f"}]}, "functions"),
        ({**CHAT, "response_format": {"type": "json_schema"}}, "response_format"),
        ({**CHAT, "modalities": ["text", "audio"]}, "modalities"),
        ({**CHAT, "audio": {"voice": "x"}}, "audio"),
        ({**CHAT, "reasoning_effort": "high"}, "reasoning_effort"),
        ({**CHAT, "top_logprobs": 2}, "top_logprobs"),
        ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({**CHAT, "max_completion_tokens": -1}, "max_completion_tokens"),
        ({**CHAT, "chat_template_kwargs": {"messages": []}}, "messages"),
        ({**CHAT, "chat_template": "{{ x }}"}, "chat_template"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_name(
    http: httpx.Client, body: dict[str, object], param: str
) -> None:
    error = refused(http, body)

    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert param.rpartition(".")[2] in str(error["message"]) or param in ("prompt", "messages")


def test_all_faults_are_named_at_once(http: httpx.Client) -> None:
    error = refused(http, {"prompt": "x", "temperature": 9, "n": 0, "nonsense": 1})

    faults = error["faults"]
    assert [fault["param"] for fault in faults] == ["model", "n", "temperature", "nonsense"]
    assert all(str(fault["message"]) in str(error["message"]) for fault in faults)


@pytest.mark.parametrize("prompt", ["", [""]])
def test_an_empty_text_is_served_where_the_tokenizer_begins_it(
    http: httpx.Client, prompt: object
) -> None:
    response = http.post("/v1/completions", json={**PROMPT, "prompt": prompt})

    assert response.status_code == 200
    assert response.json()["usage"]["prompt_tokens"] == 1


def test_an_empty_text_without_a_first_token_is_refused(http: httpx.Client) -> None:
    error = refused(http, {**PROMPT, "prompt": "", "add_special_tokens": False})

    assert (error["param"], error["message"]) == ("prompt", "The prompt has no tokens.")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        '"text"',
        "\x00",
        '{"model": "base", "prompt": "x", "temperature": NaN}',
        '{"model": "base", "prompt": "x", "temperature": Infinity}',
        '{"model": "base", "prompt": "x", "temperature": 1e999}',
        '{"model": "base", "prompt": "\\ud800"}',
        '{"model": "\\ud800", "prompt": "x"}',
        '{"model": "base", "prompt": "x", "\\ud800": 1}',
        '{"model": "base", "prompt": "x", "stop": "\\ud800"}',
        '{"model": "base", "prompt": ["x", "a\\udc00"]}',
        '{"model": "base", "prompt": "x", "metadata": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"model": "base", "prompt": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"model": "base", "prompt": "x", "seed": ' + "9" * 10_000 + "}",
    ],
    ids=lambda text: text[:50],
)
def test_a_body_that_is_no_proper_json_is_refused(http: httpx.Client, text: str) -> None:
    headers = {"content-type": "application/json"}

    response = http.post("/v1/completions", content=text.encode(), headers=headers)

    assert response.status_code == 400
    error_of(response)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_of_another_type_is_refused_and_told_the_right_one(
    http: httpx.Client, content_type: str
) -> None:
    response = http.post(
        "/v1/completions", content=json.dumps(PROMPT), headers={"content-type": content_type}
    )

    assert response.status_code == 400
    assert "application/json" in str(error_of(response)["message"])


def test_bytes_that_are_no_text_are_refused(http: httpx.Client) -> None:
    body = b'{"model": "base", "prompt": "\xff\xfe"}'

    response = http.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )

    assert response.status_code == 400
    error_of(response)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_refused(http: httpx.Client, chunked: bool) -> None:
    body = json.dumps({**PROMPT, "prompt": "x" * (17 << 20)}).encode()
    pieces = (body[start : start + 65536] for start in range(0, len(body), 65536))

    response = http.post(
        "/v1/completions",
        content=pieces if chunked else body,
        headers={"content-type": "application/json"},
    )

    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"
    assert str(16 << 20) in response.text


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "is_served"),
    [(-1, 1, True), (-2, 2, True), (-1, 2, False), (0, 1, False), (1, 1, False), (10**6, 1, False)],
)
def test_the_advertised_context_is_the_enforced_one(
    http: httpx.Client, num_tokens: int, max_tokens: int, is_served: bool
) -> None:
    limit = http.get("/v1/models/base").json()["max_model_len"]
    length = limit + num_tokens

    body = {**PROMPT, "prompt": [5] * length, "max_tokens": max_tokens}
    response = http.post("/v1/completions", json=body)

    assert response.status_code == (200 if is_served else 400)
    if not is_served:
        error = error_of(response)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert str(limit) in str(error["message"])
        assert str(length) in str(error["message"])


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a_text_that_is_too_long_is_refused_with_the_numbers(
    http: httpx.Client, route: str
) -> None:
    text = "fox jumps " * 20_000
    content = (
        {"prompt": text}
        if route == "completions"
        else {"messages": [{"role": "user", "content": text}]}
    )

    response = http.post(f"/v1/{route}", json={"model": "base", "max_tokens": 5, **content})

    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "model", ["nope", "", "Base", "RED", "red ", "base/..", "' OR 1=1", "\u00e9"]
)
def test_an_unknown_model_is_the_same_404_on_every_route(http: httpx.Client, model: str) -> None:
    answers = [
        http.post("/v1/completions", json={**PROMPT, "model": model}),
        http.post("/v1/chat/completions", json={**CHAT, "model": model}),
        http.post("/v1/completions", json={**PROMPT, "model": model, "stream": True}),
        http.post("/v1/completions", json={**PROMPT, "model": model, "n": 2, "logprobs": 1}),
    ]

    assert [answer.status_code for answer in answers] == [404] * 4
    assert {answer.text for answer in answers} == {
        http.post("/v1/completions", json={**PROMPT, "model": "unheard-of"}).text.replace(
            "unheard-of", json.dumps(model)[1:-1]
        )
    }
    assert error_of(answers[0])["code"] == "model_not_found"


def test_the_official_client_raises_its_own_errors(client: OpenAI, server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="nope"):
        client.models.retrieve("nope")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="base", prompt="x", temperature=3)
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer wrong", "Basic a-key-for-tests", "a-key-for-tests"],
)
def test_without_the_key_nothing_is_told(server: Server, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header}

    answers = [
        httpx.get(f"{server.url}/v1/models", headers=headers),
        httpx.get(f"{server.url}/v1/models/red", headers=headers),
        httpx.get(f"{server.url}/v1/nothing", headers=headers),
        httpx.post(f"{server.url}/v1/completions", headers=headers, content=b"{"),
    ]

    assert [answer.status_code for answer in answers] == [401] * 4
    assert {answer.text for answer in answers} == {answers[0].text}
    assert error_of(answers[0])["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models/red", 405),
    ],
)
def test_paths_that_are_not_there_are_errors_of_the_same_shape(
    http: httpx.Client, method: str, path: str, status: int
) -> None:
    response = http.request(method, path)

    assert response.status_code == status
    error_of(response)
