"""Prompts that the operator published: by name, by an adapter's default, by their tokens."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai import OpenAI
from support.models.adapters import write_adapter
from support.models.tokenizers import write_tokenizer
from support.server import Server, running_server

from loraplex.engine.text.tokenizer import Tokenizer

pytestmark = pytest.mark.server

RULES = " ".join(f"Rule {number}: a lamp of kind {number} is never lent." for number in range(20))
MESSAGES = [{"role": "system", "content": RULES}]
QUESTION = "May I take a lamp?"
FORCED = {"ignore_eos": True}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The same as the served model's."""
    return Tokenizer.from_folder(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Server]:
    """A server with a text and messages, and one adapter that acts behind the text."""
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "rules.txt").write_text(RULES)
    (folder / "chat.json").write_text(json.dumps(MESSAGES))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own
        adapter = write_adapter(model_folder, folder / "red", seed=1, target_modules=["q_proj"])
    options = [
        f"--model={model_folder}",
        "--num-threads=1",
        "--kv-cache-memory=32MiB",
        f"--base-prompt=rules={folder / 'rules.txt'}",
        f"--base-prompt=chat={folder / 'chat.json'}",
        f"--adapter=red={adapter}",
        "--adapter-activation=red=after_prompt",
        "--adapter-base-prompt=red=rules",
    ]
    with running_server(tmp_path_factory.mktemp("home"), *options) as server:
        yield server


@pytest.fixture
def client(shop: Server) -> Iterator[OpenAI]:
    with shop.client() as client:
        yield client


def complete(client: OpenAI, prompt: str | list[int], **extra: object) -> tuple[str, int, int]:
    """Text, prompt tokens, cached tokens."""
    model = str(extra.pop("model", "base"))
    answer = client.completions.create(
        model=model, prompt=prompt, max_tokens=8, temperature=0, extra_body=FORCED | extra
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens
    return answer.choices[0].text, answer.usage.prompt_tokens, cached or 0


def test_a_prompt_is_listed_with_its_length(shop: Server, tokenizer: Tokenizer) -> None:
    with shop.http() as http:
        found = {entry["id"]: entry for entry in http.get("/v1/base_prompts").json()["data"]}

    assert sorted(found) == ["chat", "rules"]
    assert found["rules"]["num_tokens"] == len(tokenizer.encode(RULES))
    assert (found["rules"]["kind"], found["chat"]["kind"]) == ("text", "messages")


def test_a_prompt_by_name_answers_as_if_it_were_written_out(
    client: OpenAI, tokenizer: Tokenizer
) -> None:
    own = tokenizer.encode(QUESTION, add_special_tokens=False)
    whole = [*tokenizer.encode(RULES), *own]

    text, num_tokens, cached = complete(client, QUESTION, base_prompt="rules")

    assert (text, num_tokens) == complete(client, whole)[:2]
    assert cached == len(whole) - len(own)


def test_a_prompt_is_shared_because_the_tokens_begin_with_it(
    client: OpenAI, tokenizer: Tokenizer
) -> None:
    prompt = [*tokenizer.encode(RULES), *tokenizer.encode("Never heard before", False)]

    assert complete(client, prompt)[2] == len(tokenizer.encode(RULES))


def test_nothing_but_its_tokens_decides_what_of_a_prompt_is_cached(client: OpenAI) -> None:
    prompt = list(range(5, 46))

    first = complete(client, prompt, user="a", prompt_cache_key="x", metadata={"tenant": "a"})
    again = complete(client, prompt, user="b", prompt_cache_key="y", metadata={"tenant": "b"})

    assert (first[2], again[2]) == (0, 40)
    assert first[0] == again[0]


@pytest.mark.parametrize("field", ["tenant", "namespace", "cache_salt", "adapter", "activation"])
def test_no_caller_says_whose_blocks_it_shares(client: OpenAI, field: str) -> None:
    with pytest.raises(openai.BadRequestError, match=f"Unknown parameter: {field}"):
        complete(client, QUESTION, **{field: "other"})


def test_messages_begin_a_chat(client: OpenAI) -> None:
    def ask(messages: list[dict], **extra: object) -> tuple[str | None, int]:
        answer = client.chat.completions.create(
            model="base",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=8,
            temperature=0,
            extra_body=FORCED | extra,
        )
        assert answer.usage is not None
        return answer.choices[0].message.content, answer.usage.prompt_tokens

    own = [{"role": "user", "content": QUESTION}]

    assert ask(own, base_prompt="chat") == ask([*MESSAGES, *own])


def test_an_adapters_own_prompt_is_used_and_shared_with_the_base(
    client: OpenAI, tokenizer: Tokenizer
) -> None:
    text, _, cached = complete(client, QUESTION, model="red")

    assert cached == len(tokenizer.encode(RULES))
    assert text != complete(client, QUESTION, base_prompt="rules")[0]


def test_an_adapters_own_prompt_is_not_put_before_itself(
    client: OpenAI, tokenizer: Tokenizer
) -> None:
    own = tokenizer.encode(QUESTION, add_special_tokens=False)

    written_out = [f"{RULES}{QUESTION}", [*tokenizer.encode(RULES), *own]]

    answers = [complete(client, prompt, model="red")[:2] for prompt in (QUESTION, *written_out)]
    assert answers[0] == answers[1] == answers[2]


def test_messages_may_be_followed_by_other_rules(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="base",
        messages=[{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}],
        max_tokens=1,
        extra_body={"base_prompt": "chat"},
    )

    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens


def test_how_an_adapter_acts_is_shown(shop: Server) -> None:
    with shop.http() as http:
        card = http.get("/v1/models/red").json()

    assert (card["activation"], card["base_prompt"]) == ("after_prompt", "rules")


@pytest.mark.parametrize("name", ["laws", "", "Rules", "../rules"])
def test_an_unknown_name_is_not_found(client: OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        complete(client, QUESTION, base_prompt=name)

    assert (caught.value.code, caught.value.param) == ("base_prompt_not_found", "base_prompt")


def test_a_prompt_of_the_other_kind_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="is messages, which begin chats only"):
        complete(client, QUESTION, base_prompt="chat")


def test_special_tokens_are_not_put_behind_a_prompt(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="base prompt 'rules'") as caught:
        complete(client, QUESTION, base_prompt="rules", add_special_tokens=True)

    assert caught.value.param == "add_special_tokens"


def test_an_adapter_whose_own_prompt_is_of_the_other_kind_says_so(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="'rules' of the model 'red'") as caught:
        client.chat.completions.create(model="red", messages=[{"role": "user", "content": "Hi"}])

    assert caught.value.param == "model"


def test_a_chat_that_the_template_lets_not_begin_with_the_messages_is_refused(
    client: OpenAI,
) -> None:
    with pytest.raises(openai.BadRequestError, match="does not begin with the base prompt 'chat'"):
        client.chat.completions.create(
            model="base",
            messages=[{"role": "user", "content": "Hi"}],
            extra_body={"base_prompt": "chat", "add_special_tokens": True},
        )


@pytest.mark.slow
def test_prompts_and_adapters_behind_them_outlive_the_engine(
    shop: Server, client: OpenAI, tokenizer: Tokenizer
) -> None:
    before = complete(client, QUESTION, model="red")[:2]
    shop.engine().kill()
    with shop.http() as http:
        while http.get("/health").status_code == 200:
            pass
    shop.wait_healthy()

    assert complete(client, QUESTION, model="red")[:2] == before
    assert complete(client, QUESTION, base_prompt="rules")[2] == len(tokenizer.encode(RULES))
