"""/v1/chat/completions and /v1/models by the official clients."""

import asyncio

import httpx
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.server import Server

from loraplex import __version__

pytestmark = pytest.mark.server

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello there"},
]
FORCED = {"ignore_eos": True}
ALL_MODELS = ("base", "red", "blue")


def chat(client: OpenAI, model: str = "base", **more: object) -> ChatCompletion:
    body: dict = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0, "extra_body": FORCED}
    return client.chat.completions.create(model=model, **body | more)


def stream(client: OpenAI, model: str = "base", **more: object) -> list[ChatCompletionChunk]:
    return list(chat(client, model, stream=True, **more))


def test_each_model_answers_as_itself(client: OpenAI) -> None:
    answers = {model: chat(client, model) for model in ALL_MODELS}

    assert {answer.model for answer in answers.values()} == set(ALL_MODELS)
    assert len({answer.choices[0].message.content for answer in answers.values()}) == 3
    assert {answer.choices[0].message.role for answer in answers.values()} == {"assistant"}


@pytest.mark.parametrize("model", ["red", "blue"])
def test_an_adapter_acts_on_every_route(client: OpenAI, model: str) -> None:
    def texts(name: str) -> list[str]:
        prompt = {"model": name, "prompt": "Hello", "max_tokens": 8, "temperature": 0}
        streamed = client.completions.create(**prompt, stream=True, extra_body=FORCED)
        two = client.completions.create(**prompt, n=2, extra_body=FORCED)
        scored = client.completions.create(**prompt, logprobs=1, echo=True, extra_body=FORCED)
        return [
            str(chat(client, name).choices[0].message.content),
            "".join(c.choices[0].delta.content or "" for c in stream(client, name)),
            "".join(chunk.choices[0].text for chunk in streamed),
            two.choices[1].text,
            str(scored.choices[0].logprobs.token_logprobs[:3]),
        ]

    assert all(own != base for own, base in zip(texts(model), texts("base"), strict=True))


@pytest.mark.anyio
async def test_models_answer_side_by_side_as_they_do_alone(server: Server, client: OpenAI) -> None:
    alone = [chat(client, model, max_tokens=40).choices[0].message for model in ALL_MODELS * 4]

    async with server.async_client() as many:
        together = await asyncio.gather(
            *(
                many.chat.completions.create(
                    model=model,
                    messages=MESSAGES,
                    max_tokens=40,
                    temperature=0,
                    extra_body=FORCED,
                )
                for model in ALL_MODELS * 4
            )
        )

    assert [answer.choices[0].message.content for answer in together] == [
        message.content for message in alone
    ]


def test_a_stream_begins_with_the_role_and_adds_up(client: OpenAI) -> None:
    chunks = stream(client, n=2)

    whole = chat(client, n=2)
    for choice in whole.choices:
        deltas = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert [delta.delta.role for delta in deltas].count("assistant") == 1
        assert deltas[0].delta.role == "assistant"
        text = "".join(delta.delta.content or "" for delta in deltas)
        assert text == choice.message.content
        assert deltas[-1].finish_reason == "length"


def test_usage_comes_once_at_the_end_where_it_is_asked_for(client: OpenAI) -> None:
    whole = chat(client, n=2)

    chunks = stream(client, n=2, stream_options={"include_usage": True})

    *others, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None and chunk.choices for chunk in others)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


@pytest.mark.parametrize("options", [None, {"include_usage": False}])
def test_usage_does_not_come_unasked(server: Server, options: dict[str, bool] | None) -> None:
    body = {"model": "base", "messages": MESSAGES, "max_tokens": 4, "stream": True}

    with server.http() as http:
        text = http.post("/v1/chat/completions", json={**body, "stream_options": options}).text

    assert '"usage"' not in text
    assert text.endswith("data: [DONE]\n\n")


def test_logprobs_come_in_the_chat_shape(client: OpenAI) -> None:
    choice = chat(client, logprobs=True, top_logprobs=2).choices[0]

    positions = choice.logprobs.content
    assert len(positions) == 8
    assert all(len(position.top_logprobs) == 2 for position in positions)
    text = bytes(byte for position in positions for byte in position.bytes)
    assert text.decode(errors="replace") == choice.message.content


def test_parts_roles_and_answers_sent_back_are_understood(client: OpenAI) -> None:
    first = chat(client)
    parts = [{"type": "text", "text": "Hello there"}]

    same = chat(
        client,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": parts},
        ],
    )
    next_turn = chat(
        client,
        messages=[
            *MESSAGES,
            first.choices[0].message.model_dump(),
            {"role": "user", "content": "And?", "name": "ada"},
        ],
    )

    assert same.choices[0].message.content == first.choices[0].message.content
    assert next_turn.usage.prompt_tokens > first.usage.prompt_tokens


def test_harmless_parameters_change_nothing(client: OpenAI) -> None:
    plain = chat(client).choices[0].message.content

    answer = chat(
        client,
        user="ada",
        metadata={"a": "b"},
        store=False,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        parallel_tool_calls=True,
        service_tier="auto",
        max_completion_tokens=8,
        logit_bias={},
        stop=None,
        seed=None,
    )

    assert answer.choices[0].message.content == plain


def test_without_a_limit_an_answer_fills_the_context(client: OpenAI, server: Server) -> None:
    limit = client.models.retrieve("base").model_extra["max_model_len"]
    answer = client.completions.create(
        model="base", prompt=[5] * (limit - 20), max_tokens=20, temperature=0, extra_body=FORCED
    )

    assert answer.usage.total_tokens == limit
    server.wait_idle()


def test_models_are_listed_with_their_parent_and_limit(client: OpenAI) -> None:
    models = {model.id: model for model in client.models.list()}

    assert set(models) == set(ALL_MODELS)
    assert models["red"].model_extra["parent"] == "base"
    assert models["base"].model_extra["parent"] is None
    assert client.models.retrieve("red") == models["red"]
    assert len({model.model_extra["max_model_len"] for model in models.values()}) == 1


def test_forty_fresh_connections_find_every_adapter(server: Server) -> None:
    for _ in range(40):
        with server.client() as client:
            assert client.models.retrieve("red").id == "red"
            client.completions.create(model="red", prompt="x", max_tokens=1)


def test_operators_see_health_version_and_numbers(server: Server) -> None:
    before = server.metric("vllm:generation_tokens_total")
    with server.client() as client:
        chat(client, "red", max_tokens=5)

    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/version").json() == {"version": __version__}
    assert server.metric("vllm:generation_tokens_total") == before + 5
    assert server.metric("vllm:request_success_total") > 0
    assert server.metric("vllm:time_to_first_token_seconds_count") > 0
    assert server.metric("loraplex:adapters_registered") == 2


def test_the_banner_can_be_pasted_and_names_every_model(server: Server) -> None:
    text = "".join(server.output)

    assert f"export OPENAI_BASE_URL={server.url}/v1\n" in text
    assert "export OPENAI_API_KEY=a-key-for-tests\n" in text
    assert all(f'"model": "{model}"' in text for model in ALL_MODELS)
