"""Base prompts: what a file may hold, and with which tokens prompts begin that use it."""

import json
from pathlib import Path

import pytest
from support.tokenizers import write_tokenizer

from loraplex.engine.tokenizer import Tokenizer
from loraplex.platform.catalog.base_prompts import BasePrompts, PromptSource, read_prompts
from loraplex.platform.errors import BasePromptNotFound, SettingsRefused

MESSAGES = [
    {"role": "system", "content": "You answer questions about the lamps of a small shop."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Good day."},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_text_is_taken_as_it_is(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = PromptSource.read(write(tmp_path / "prompt.txt", "Be brief.\n"))

    assert source.token_ids(tokenizer) == tokenizer.encode("Be brief.\n")


@pytest.mark.parametrize("next_words", ["zebra", "\n\n", "", "9"])
def test_every_chat_begins_with_the_tokens_of_messages(
    tmp_path: Path, tokenizer: Tokenizer, next_words: str
) -> None:
    source = PromptSource.read(write(tmp_path / "prompt.json", MESSAGES))
    token_ids = source.token_ids(tokenizer)

    chat = tokenizer.render_chat([*MESSAGES, {"role": "user", "content": next_words}])

    prompt = tokenizer.encode(chat, add_special_tokens=False)
    assert prompt[: len(token_ids)] == token_ids
    assert "Good day." in tokenizer.decode(token_ids)


def test_all_that_is_wrong_with_all_files_is_told(tmp_path: Path) -> None:
    paths = {
        "a": write(tmp_path / "a.json", "{"),
        "b": write(tmp_path / "b.json", [{"role": "pope", "content": 3}]),
        "c": tmp_path / "none.txt",
        "d": write(tmp_path / "d.json", []),
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
    ]


def test_a_name_that_was_not_published_is_not_found() -> None:
    with pytest.raises(BasePromptNotFound, match="no base prompt 'x'"):
        BasePrompts().resolve("x")
