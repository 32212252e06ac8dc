"""Base prompts: what a file may hold, and with which tokens prompts begin that use it."""

import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from support.models.tokenizers import write_tokenizer

from loraplex.engine.errors import PromptRejected
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.catalog.base_prompts import BasePrompts, PromptSource, read_prompts
from loraplex.platform.errors import BasePromptNotFound, SettingsRefused

MESSAGES = [
    {"role": "system", "content": "You answer questions about the lamps of a small shop."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Good day."},
]
NOW = datetime(2026, 1, 31, 23, 59)
WITH_DATE = (
    "{% for message in messages %}{% if loop.index0 % 2 != (message.role == 'assistant') %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ strftime_now('%d %b') }} {{ message.role }}: {{ message.content }};{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_text_is_taken_as_it_is(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"Be brief.\r\n")

    source = PromptSource.read(path)

    assert source.token_ids(tokenizer, NOW) == tokenizer.encode("Be brief.\r\n")


@pytest.mark.parametrize("role", ["user", "system", "assistant"])
@pytest.mark.parametrize("next_words", ["zebra", "\n\n", "", "9"])
def test_every_chat_begins_with_the_tokens_of_messages(
    tmp_path: Path, tokenizer: Tokenizer, next_words: str, role: str
) -> None:
    source = PromptSource.read(write(tmp_path / "prompt.json", MESSAGES))
    token_ids = source.token_ids(tokenizer, NOW)

    chat = tokenizer.render_chat([*MESSAGES, {"role": role, "content": next_words}])

    prompt = tokenizer.encode(chat, add_special_tokens=False)
    assert prompt[: len(token_ids)] == token_ids
    assert "Good day." in tokenizer.decode(token_ids)


def test_messages_are_continued_as_the_template_lets_them_and_at_one_time(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", chat_template=WITH_DATE)
    tokenizer = Tokenizer.from_folder(folder)
    source = PromptSource(messages=(MESSAGES[1],))

    token_ids = source.token_ids(tokenizer, NOW)

    assert tokenizer.decode(token_ids) == "31 Jan user: Hello;31 Jan assistant:"
    assert source.token_ids(tokenizer, NOW + timedelta(days=1)) != token_ids


def test_messages_that_the_template_refuses_are_no_prompt(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", chat_template=WITH_DATE)
    source = PromptSource(messages=(MESSAGES[2],))

    with pytest.raises(PromptRejected, match="roles must alternate"):
        source.token_ids(Tokenizer.from_folder(folder), NOW)


def test_all_that_is_wrong_with_all_files_is_told(tmp_path: Path) -> None:
    paths = {
        "a": write(tmp_path / "a.json", "{"),
        "b": write(tmp_path / "b.json", [{"role": "pope", "content": 3}]),
        "c": tmp_path / "none.txt",
        "d": write(tmp_path / "d.json", []),
        "e": write(tmp_path / "e.txt", ""),
    }

    with pytest.raises(SettingsRefused) as caught:
        read_prompts(paths)

    told = [fault.partition(": ")[0] for fault in caught.value.faults]
    assert told == [
        "--base-prompt a",
        "--base-prompt b",
        "--base-prompt b",
        "--base-prompt c",
        "--base-prompt d",
        "--base-prompt e",
    ]


def test_a_name_that_was_not_published_is_not_found() -> None:
    with pytest.raises(BasePromptNotFound, match="no base prompt 'x'"):
        BasePrompts().resolve("x")
