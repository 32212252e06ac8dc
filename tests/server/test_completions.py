"""/v1/completions by the official client, whole and streamed."""

import pytest
from openai import OpenAI
from openai.types import Completion
from support.models.tokenizers import write_tokenizer
from support.server import Server

from loraplex.engine.text.tokenizer import Tokenizer

pytestmark = pytest.mark.server

FORCED = {"ignore_eos": True}  # this random model would end where it likes
PROMPT = "The quick brown fox"


def complete(client: OpenAI, model: str = "base", **more: object) -> Completion:
    body: dict = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "extra_body": FORCED}
    return client.completions.create(model=model, **body | more)


def stream(client: OpenAI, model: str = "base", **more: object) -> list[Completion]:
    return list(complete(client, model, stream=True, **more))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The same as the served model's."""
    return Tokenizer.from_folder(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_the_four_forms_of_a_prompt_mean_the_same(client: OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    forms = [PROMPT, [PROMPT], ids, [ids]]

    texts = {complete(client, prompt=form).choices[0].text for form in forms}

    assert len(texts) == 1


def test_many_prompts_give_choices_in_their_order(client: OpenAI) -> None:
    prompts = [PROMPT, "SELECT name", "A server answers"]

    together = complete(client, prompt=prompts, n=2)

    alone = [complete(client, prompt=prompt).choices[0].text for prompt in prompts]
    assert [choice.index for choice in together.choices] == list(range(6))
    assert [choice.text for choice in together.choices] == [
        text for text in alone for _ in range(2)
    ]


def test_usage_counts_each_prompt_once(client: OpenAI, tokenizer: Tokenizer) -> None:
    prompts = ["One of them", "And one more"]

    usage = complete(client, prompt=prompts, n=3).usage

    assert usage is not None
    assert usage.prompt_tokens == sum(len(tokenizer.encode(prompt)) for prompt in prompts)
    assert usage.completion_tokens == 2 * 3 * 8
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_prompt_seen_before_comes_from_the_cache(client: OpenAI) -> None:
    prompt = "A prompt that nobody else sends, long enough for several blocks of the cache."

    first, second = complete(client, prompt=prompt), complete(client, prompt=prompt)

    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= 16
    assert second.choices[0].text == first.choices[0].text


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"echo": True}, {"stop": ["e", "zz"]}])
def test_a_stream_adds_up_to_the_whole_answer(client: OpenAI, more: dict[str, object]) -> None:
    whole = complete(client, max_tokens=24, **more)

    chunks = stream(client, max_tokens=24, **more)

    for choice in whole.choices:
        own = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.text for c in own) == choice.text
        assert own[-1].finish_reason == choice.finish_reason
        assert {c.finish_reason for c in own[:-1]} <= {None}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_sixteen_tokens_are_the_default(client: OpenAI) -> None:
    answer = client.completions.create(model="base", prompt=PROMPT, extra_body=FORCED)

    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_a_seed_makes_choices_reproducible_and_different(client: OpenAI) -> None:
    def sampled(seed: int) -> list[str]:
        answer = complete(client, temperature=1, seed=seed, n=4)
        return [choice.text for choice in answer.choices]

    first = sampled(7)

    assert sampled(7) == first
    assert sampled(8) != first
    assert len(set(first)) == 4


def test_logprobs_line_up_with_the_text(client: OpenAI) -> None:
    choice = complete(client, logprobs=3).choices[0]

    logprobs = choice.logprobs
    assert logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 8
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values())


def test_echo_puts_the_prompt_and_its_logprobs_first(client: OpenAI, tokenizer: Tokenizer) -> None:
    whole = complete(client, echo=True, logprobs=2)
    plain = complete(client, logprobs=2)

    choice = whole.choices[0]
    assert choice.text == PROMPT + plain.choices[0].text
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.tokens) == len(tokenizer.encode(PROMPT)) + 8
    assert choice.logprobs.tokens[-8:] == plain.choices[0].logprobs.tokens


def test_streamed_logprobs_equal_whole_ones(client: OpenAI) -> None:
    whole = complete(client, echo=True, logprobs=2).choices[0].logprobs

    parts = [
        chunk.choices[0].logprobs
        for chunk in stream(client, echo=True, logprobs=2)
        if chunk.choices[0].logprobs
    ]

    assert [token for part in parts for token in part.tokens] == whole.tokens
    assert [offset for part in parts for offset in part.text_offset] == whole.text_offset


def test_prompt_logprobs_come_in_vllms_shape(client: OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)

    answer = complete(client, extra_body={"prompt_logprobs": 2})

    positions = answer.choices[0].model_extra["prompt_logprobs"]
    assert positions[0] is None
    assert all(
        str(token) in position for token, position in zip(ids[1:], positions[1:], strict=True)
    )
    assert set(positions[1][str(ids[1])]) == {"logprob", "rank", "decoded_token"}


@pytest.mark.parametrize("streaming", [False, True])
def test_masked_tokens_leave_only_finite_numbers(server: Server, streaming: bool) -> None:
    body = {
        "model": "base",
        "prompt": "a b c",
        "echo": True,
        "logprobs": 5,
        "top_k": 1,
        "logit_bias": {"5": -100},
        "stream": streaming,
    }

    with server.http() as http:
        text = http.post("/v1/completions", json=body).text

    assert "tokens" in text
    assert not any(word in text for word in ("NaN", "Infinity", "inf,"))


def test_token_ids_steer_and_stop_an_answer(client: OpenAI, tokenizer: Tokenizer) -> None:
    (letter,) = tokenizer.encode("e", add_special_tokens=False)
    always = {str(letter): 100}

    biased = complete(client, logit_bias=always)
    stopped = complete(client, logit_bias=always, extra_body={"stop_token_ids": [letter], **FORCED})
    later = complete(
        client,
        logit_bias=always,
        extra_body={"stop_token_ids": [letter], "min_tokens": 3, **FORCED},
    )

    assert biased.choices[0].text == "e" * 8
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].model_extra["stop_reason"] == letter
    assert stopped.usage.completion_tokens == 1
    assert later.usage.completion_tokens == 4


def test_a_stop_string_is_left_out_unless_it_is_asked_for(client: OpenAI) -> None:
    text = complete(client, max_tokens=40).choices[0].text
    stop = text[5:8]

    without = complete(client, max_tokens=40, stop=stop)
    with_it = complete(
        client,
        max_tokens=40,
        stop=stop,
        extra_body={"include_stop_str_in_output": True, **FORCED},
    )

    assert without.choices[0].text == text[: text.index(stop)]
    assert with_it.choices[0].text == without.choices[0].text + stop
    assert without.choices[0].finish_reason == "stop"
    assert without.choices[0].model_extra["stop_reason"] == stop
