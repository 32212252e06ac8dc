"""What an adapter's folder says about text is used, told of, or refused."""

import json
import os
import shutil
from pathlib import Path

import pytest
from support.models.tokenizers import write_tokenizer

from loraplex.engine.errors import RequestRejected
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.catalog.adapter_text import (
    MAX_TEMPLATE,
    NO_TEXT,
    OTHER_TOKENIZER,
    AdapterText,
    read_adapter_text,
)

TEMPLATE = "base: {{ messages[0].content }}"
OWN = "own: {{ messages[0].content }}"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("base"), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> Tokenizer:
    return Tokenizer.from_folder(base)


def read(folder: Path, base: Path, tokenizer: Tokenizer) -> AdapterText:
    return read_adapter_text(folder, base, tokenizer)


def test_a_folder_without_any_has_the_base_models(
    tmp_path: Path, base: Path, tokenizer: Tokenizer
) -> None:
    assert read(tmp_path, base, tokenizer) == NO_TEXT


def test_copies_of_the_base_models_are_none_of_its_own(
    tmp_path: Path, base: Path, tokenizer: Tokenizer
) -> None:
    folder = shutil.copytree(base, tmp_path / "copy")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"max_length": 8, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(content, indent=1))

    assert read(folder, base, tokenizer) == NO_TEXT


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "list"])
def test_a_template_of_its_own_is_found_where_transformers_keeps_it(
    tmp_path: Path, base: Path, tokenizer: Tokenizer, place: str
) -> None:
    named = [{"name": "default", "template": OWN}, {"name": "rag", "template": "x"}]
    config = json.dumps({"chat_template": named if place == "list" else OWN})
    name = "tokenizer_config.json" if place == "list" else place
    (tmp_path / name).write_text(OWN if place.endswith(".jinja") else config)

    assert read(tmp_path, base, tokenizer) == AdapterText(OWN)


def test_a_tokenizer_that_differs_is_told_of(
    tmp_path: Path, base: Path, tokenizer: Tokenizer
) -> None:
    folder = write_tokenizer(tmp_path, vocab_size=300)

    assert read(folder, base, tokenizer) == AdapterText(None, (OTHER_TOKENIZER,))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{% for %}", "broken"),
        (b"\xff", "UTF-8"),
        (b"x" * (MAX_TEMPLATE + 1), "more than"),
    ],
)
def test_what_is_no_template_is_refused_without_a_path(
    tmp_path: Path, base: Path, tokenizer: Tokenizer, content: bytes, said: str
) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(content)

    with pytest.raises(RequestRejected, match=said) as refusal:
        read(tmp_path, base, tokenizer)

    assert str(tmp_path) not in refusal.value.message


def test_links_and_pipes_are_not_followed(tmp_path: Path, base: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "chat_template.jinja").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "tokenizer_config.json")

    assert read(tmp_path, base, tokenizer) == NO_TEXT
