"""What bodies may say, and what is said of those that say something else."""

from typing import Any

import pytest
from pydantic import ValidationError

from loraplex.platform.http.faults import fault_of
from loraplex.platform.inference.bodies.schemas import ChatCompletionRequest, CompletionRequest

CHAT = {"model": "base", "messages": [{"role": "user", "content": "Hello"}]}
PROMPT = {"model": "base", "prompt": "Hello"}


def faults(body: dict[str, Any]) -> list[tuple[str | None, str]]:
    kind = ChatCompletionRequest if "messages" in body else CompletionRequest
    with pytest.raises(ValidationError) as refusal:
        kind.model_validate(body)
    return [tuple(fault_of(error)) for error in refusal.value.errors()]


@pytest.mark.parametrize(
    "more",
    [
        {"stream": True, "stream_options": {"include_usage": None, "unheard_of": None}},
        {"messages": [{**CHAT["messages"][0], "reasoning_content": None, "unheard_of": None}]},
        {"documents": None, "guided_json": None, "unheard_of": None},
        dict.fromkeys(ChatCompletionRequest.model_fields.keys() - CHAT.keys()),
    ],
)
def test_null_is_the_same_as_leaving_it_out(more: dict[str, Any]) -> None:
    plain = {**CHAT, "stream": "stream" in more and bool(more["stream"])}

    body = ChatCompletionRequest.model_validate({**CHAT, **more})

    expected = ChatCompletionRequest.model_validate(plain)
    assert body.to_sampling() == expected.to_sampling()
    assert body.messages == expected.messages
    assert body.answer_options.usage_at_end is False


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": False, "top_logprobs": 0},
        {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False},
        {"length_penalty": 1, "echo": False, "documents": [], "logits_processors": []},
        {"include_reasoning": True, "spaces_between_special_tokens": True},
    ],
)
def test_what_asks_for_nothing_is_taken(more: dict[str, Any]) -> None:
    body = ChatCompletionRequest.model_validate({**CHAT, **more})

    plain = ChatCompletionRequest.model_validate(CHAT)
    assert body.num_logprobs is None
    assert body.to_sampling(logprobs=None) == plain.to_sampling(logprobs=None)


@pytest.mark.parametrize(
    "more", [{"use_beam_search": True}, {"length_penalty": 0.5}, {"echo": True}, {"echo": 0}]
)
def test_what_asks_for_something_else_is_refused(more: dict[str, Any]) -> None:
    assert [param for param, _ in faults({**CHAT, **more})] == list(more)


def test_no_stop_string_is_dropped() -> None:
    stop = [str(number) for number in range(16)]

    assert ChatCompletionRequest.model_validate({**CHAT, "stop": stop}).stop == tuple(stop)
    assert faults({**CHAT, "stop": [*stop, "x"]}) == [
        ("stop", "stop takes at most 16 strings, got 17")
    ]


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"temperature": 3}, "temperature must be between 0.0 and 2.0, got 3.0"),
        ({"top_p": 0}, "top_p must be above 0.0 and at most 1.0, got 0.0"),
        ({"n": 0}, "n must be between 1 and 128, got 0"),
        ({"priority": 1001}, "priority must be between -1000 and 1000, got 1001"),
        ({"logprobs": 21}, "logprobs must be between 0 and 20, got 21"),
        ({"repetition_penalty": -1}, "repetition_penalty must be above 0.0 and at most"),
        ({"logit_bias": {"x": 1}}, "logit_bias must map token ids to numbers, got the key 'x'"),
        ({"logit_bias": {"\u0663": 1}}, "got the key '\u0663'"),
        ({"seed": 10**400}, "seed must be between"),
    ],
)
def test_ranges_are_told_in_one_style_and_with_the_value(more: dict[str, Any], fault: str) -> None:
    ((param, message),) = faults({**PROMPT, **more})

    assert param == next(iter(more))
    assert fault in message
    assert len(message) < 200


def test_the_schema_shows_the_ranges() -> None:
    schema = CompletionRequest.model_json_schema()["properties"]

    assert schema["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0.0, "maximum": 2.0}
    assert schema["top_p"]["anyOf"][0] == {
        "type": "number",
        "exclusiveMinimum": 0.0,
        "maximum": 1.0,
    }
