"""Whatever a body holds, the answer is small and says how much is wrong."""

import json
from typing import Any

import pytest

from loraplex.platform.errors import InvalidRequest
from loraplex.platform.inference.bodies.parsing import parse
from loraplex.platform.inference.bodies.schemas import (
    MAX_MESSAGES,
    ChatCompletionRequest,
    CompletionRequest,
)

HELLO = {"role": "user", "content": "Hello"}
CHAT = {"model": "base", "messages": [HELLO]}
COMPLETION = {"model": "base", "prompt": "Hello"}
SOME_KB = 16_000


def refusal(kind: type[Any], body: object) -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(InvalidRequest) as caught:
        parse(kind, content)
    answer = caught.value.to_body()
    assert len(json.dumps(answer)) < SOME_KB
    error: dict[str, Any] = answer["error"]  # type: ignore[assignment]
    return error


@pytest.mark.parametrize("count", [1000, MAX_MESSAGES])
def test_the_first_faults_of_many_messages_are_told_and_the_rest_is_counted(count: int) -> None:
    error = refusal(ChatCompletionRequest, {**CHAT, "messages": [{}] * count})

    assert error["param"] == "messages.0.role"
    assert len(error["faults"]) == 10
    assert error["num_faults"] == 2 * count
    assert error["message"].endswith(f"and {2 * count - 10} more")


@pytest.mark.parametrize("item", [{}, 1, HELLO])
def test_a_chat_has_a_largest_number_of_messages(item: object) -> None:
    error = refusal(ChatCompletionRequest, {**CHAT, "messages": [item] * 50_000})

    assert error["message"] == "messages: takes at most 2048 messages, got 50000"


def test_the_largest_number_of_messages_is_taken() -> None:
    body = parse(ChatCompletionRequest, json.dumps({**CHAT, "messages": [HELLO] * 2048}).encode())

    assert len(body.messages) == MAX_MESSAGES


@pytest.mark.parametrize(
    ("kind", "body", "num_faults"),
    [
        (CompletionRequest, {**COMPLETION, **{f"k{i}": 1 for i in range(50_000)}}, 50_000),
        (ChatCompletionRequest, {**CHAT, **{f"k{i}": 1 for i in range(11)}, "n": "x"}, 12),
    ],
)
def test_unknown_parameters_are_counted(
    kind: type[Any], body: dict[str, object], num_faults: int
) -> None:
    assert refusal(kind, body)["num_faults"] == num_faults


@pytest.mark.parametrize(
    "body",
    [
        {**CHAT, "messages": [{**HELLO, **{f"k{i}": 1 for i in range(50_000)}}]},
        {**CHAT, "stream": True, "stream_options": {f"k{i}": 1 for i in range(50_000)}},
        {**CHAT, "stream": True, "stream_options": {f"k{i}": 1 for i in range(5_000)}},
        {**CHAT, "stop": ["x"] * 50_000},
        {**CHAT, "logit_bias": {str(i): 1 for i in range(50_000)}},
        {**CHAT, "chat_template_kwargs": {"deep": [[[]] * 20_000]}},
        {**CHAT, "messages": [{**HELLO, "y" * 100_000: 1}]},
        {**CHAT, "x" * 100_000: 1},
        {**CHAT, "messages": [{**HELLO, "role": "x" * 100_000}]},
        {**CHAT, "tools": ["x" * 100_000]},
        {**CHAT, "n": "x" * 100_000},
        {**CHAT, "n": 10**4000},
    ],
)
def test_what_is_wrong_is_cut_short(body: dict[str, object]) -> None:
    error = refusal(ChatCompletionRequest, body)

    assert len(error["param"] or "") <= 100


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"model": "base", ', "not valid JSON"),
        (b'{"model": "\xff"}', "not UTF-8"),
        (b'{"n": ' + b"1" * 10_000 + b"}", "too many digits"),
        (b"[" * 100_000, "nested too deeply"),
        (b'[{"model": "base"}]', "must be a JSON object"),
    ],
)
def test_what_is_no_json_object_is_refused_with_its_reason(content: bytes, reason: str) -> None:
    assert reason in refusal(CompletionRequest, content)["message"]


def test_all_kinds_of_faults_are_told_at_once() -> None:
    error = refusal(
        ChatCompletionRequest, {**CHAT, "top_p": 2, "wrong": 1, "messages": [{"role": "user"}]}
    )

    named = {fault["param"] for fault in error["faults"]}
    assert named == {"top_p", "wrong", "messages.0.content"}


def test_what_says_nothing_may_hold_anything() -> None:
    body = parse(CompletionRequest, json.dumps({**COMPLETION, "metadata": [[]] * 50_000}).encode())

    assert body.metadata is None
