"""What callers of other servers ask for beside OpenAI's parameters."""

from collections.abc import Iterator

import httpx
import openai
import pytest
from openai import OpenAI
from support.models.tokenizers import write_tokenizer
from support.server import Server

from loraplex.engine.text.tokenizer import Tokenizer

pytestmark = pytest.mark.server

MESSAGES = [{"role": "user", "content": "Hello there"}]
PROMPT = {"model": "base", "prompt": "Hello there", "temperature": 0, "max_tokens": 8}
CHAT = {"model": "base", "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
FORCED = {"ignore_eos": True}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The same as the served model's."""
    return Tokenizer.from_folder(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with server.http() as http:
        yield http


def test_each_chunk_can_say_the_usage_so_far(client: OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}

    chunks = list(
        client.chat.completions.create(
            **CHAT, n=2, stream=True, stream_options=options, extra_body=FORCED
        )
    )

    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 16)
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {chunks[-1].usage.prompt_tokens}
    assert all(
        c.usage.total_tokens == c.usage.prompt_tokens + c.usage.completion_tokens for c in chunks
    )


def test_token_ids_come_where_they_are_asked_for(http: httpx.Client, tokenizer: Tokenizer) -> None:
    body = {**PROMPT, **FORCED, "return_token_ids": True}
    whole = http.post("/v1/completions", json=body).json()["choices"][0]
    chat = http.post("/v1/chat/completions", json={**CHAT, **FORCED, "return_token_ids": True})

    assert whole["prompt_token_ids"] == tokenizer.encode("Hello there")
    assert len(whole["token_ids"]) == 8
    assert len(chat.json()["choices"][0]["token_ids"]) == 8
    assert chat.json()["prompt_token_ids"][0] == 0


def test_a_streams_token_ids_add_up(client: OpenAI) -> None:
    extra = {**FORCED, "return_token_ids": True}
    whole = client.chat.completions.create(**CHAT, extra_body=extra)

    chunks = list(client.chat.completions.create(**CHAT, stream=True, extra_body=extra))

    first, *_ = chunks
    pieces = [token for c in chunks for token in c.choices[0].model_extra.get("token_ids", [])]
    assert first.model_extra["prompt_token_ids"] == whole.model_extra["prompt_token_ids"]
    assert pieces == whole.choices[0].model_extra["token_ids"]


def test_logprobs_can_name_tokens_by_id(client: OpenAI) -> None:
    extra = {**FORCED, "return_token_ids": True, "return_tokens_as_token_ids": True}

    choice = client.completions.create(**PROMPT, logprobs=2, echo=True, extra_body=extra).choices[0]

    ids = choice.model_extra["prompt_token_ids"] + choice.model_extra["token_ids"]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in ids]
    assert all(name.startswith("token_id:") for name in choice.logprobs.top_logprobs[-1])


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_prompt_can_be_scored_without_an_answer(client: OpenAI, is_stream: bool) -> None:
    body = {**PROMPT, "echo": True, "logprobs": 1}
    full = client.completions.create(**body, extra_body=FORCED).choices[0]
    scoring = {**body, "max_tokens": 0}

    if is_stream:
        options = {"include_usage": True}
        *chunks, last = client.completions.create(**scoring, stream=True, stream_options=options)
        (choice,) = [chunk.choices[0] for chunk in chunks]
        usage = last.usage
    else:
        answer = client.completions.create(**scoring)
        choice, usage = answer.choices[0], answer.usage

    count = usage.prompt_tokens
    assert (choice.text, choice.finish_reason) == ("Hello there", "length")
    assert choice.logprobs.token_logprobs == full.logprobs.token_logprobs[:count]
    assert len(choice.logprobs.tokens) == count
    assert usage.completion_tokens == 0


def test_no_answer_and_no_echo_ask_for_nothing(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens must be at least 1, or 0 with"):
        client.completions.create(**{**PROMPT, "max_tokens": 0})
    scoring = {**PROMPT, "max_tokens": 0, "echo": True}
    with pytest.raises(openai.BadRequestError, match="must not exceed max_tokens"):
        client.completions.create(**scoring, extra_body={"min_tokens": 2})
    with pytest.raises(openai.BadRequestError, match="max_tokens must be between 1 and"):
        client.chat.completions.create(**{**CHAT, "max_tokens": 0})


def test_only_allowed_tokens_come(client: OpenAI, tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(letter, False)[0] for letter in "xyz"]

    answer = client.completions.create(**PROMPT, extra_body={**FORCED, "allowed_token_ids": ids})

    assert set(answer.choices[0].text) <= set("xyz")
    assert len(answer.choices[0].text) == 8


def test_bad_words_do_not_come(client: OpenAI) -> None:
    always = {str(token): 100 for token in (70, 71)}
    body = {**PROMPT, "logit_bias": always}
    first = client.completions.create(**body, extra_body=FORCED).choices[0].text

    answer = client.completions.create(**body, extra_body={**FORCED, "bad_words": [first[:2]]})

    assert first[:2] not in answer.choices[0].text


def test_an_answer_can_go_on_with_the_last_message(http: httpx.Client) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Good"}]
    body = {**CHAT, **FORCED, "messages": messages, "return_token_ids": True}

    open_end = http.post("/v1/chat/completions", json={**body, "continue_final_message": True})
    both = http.post(
        "/v1/chat/completions",
        json={**body, "continue_final_message": True, "add_generation_prompt": True},
    )

    tokens = http.post(
        "/v1/completions",
        json={
            **PROMPT,
            **FORCED,
            "prompt": "### User:\nHello there\n\n### Assistant:\nGood",
            "return_token_ids": True,
        },
    ).json()["choices"][0]["prompt_token_ids"]
    assert open_end.json()["prompt_token_ids"] == tokens
    assert both.status_code == 400


@pytest.mark.parametrize("is_text", [True, False])
def test_a_prompt_can_be_cut_at_its_start(
    http: httpx.Client, tokenizer: Tokenizer, is_text: bool
) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 2000
    body = {**PROMPT, "prompt": text if is_text else tokenizer.encode(text), "max_tokens": 3}
    limit = http.get("/v1/models/base").json()["max_model_len"]

    def kept(count: int) -> list[int]:
        more = {"truncate_prompt_tokens": count, "return_token_ids": True}
        answer = http.post("/v1/completions", json={**body, **more})
        ids: list[int] = answer.json()["choices"][0]["prompt_token_ids"]
        return ids

    assert kept(5) == tokenizer.encode(text)[-5:]
    assert kept(-1) == tokenizer.encode(text)[-(limit - 3) :]
    refused = http.post("/v1/completions", json={**body, "truncate_prompt_tokens": 0})
    assert refused.json()["error"]["param"] == "truncate_prompt_tokens"


def test_answers_name_the_checkpoint_that_they_are_from(client: OpenAI) -> None:
    chat = client.chat.completions.create(**CHAT)
    (chunk, *_) = client.chat.completions.create(**CHAT, stream=True)

    assert chat.system_fingerprint == chunk.system_fingerprint
    assert str(chat.system_fingerprint).startswith("fp_")


def test_offsets_count_the_characters_of_the_echoed_text(http: httpx.Client) -> None:
    text = "A \U00013000 b"
    body = {**PROMPT, "prompt": text, "echo": True, "logprobs": 1, "max_tokens": 1}

    choice = http.post("/v1/completions", json=body).json()["choices"][0]

    offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    assert choice["text"].startswith(text)
    assert offsets[0] == offsets[1] == 0  # the first token is no part of the text
    assert offsets[tokens.index("A")] == 0
    assert offsets[-2] in (3, 4)  # "b", or " b" where that is one token
    assert offsets[-1] == 5


def test_a_special_token_can_stop_an_answer(client: OpenAI) -> None:
    end = {"logit_bias": {"1": 100}}  # </s>

    answer = client.completions.create(**PROMPT, stop="</s>", **end, extra_body=FORCED)
    with pytest.raises(openai.BadRequestError, match="stop_token_ids"):
        client.completions.create(**PROMPT, stop="x</s>")

    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra["stop_reason"] == "</s>"
    assert answer.usage.completion_tokens == 1
