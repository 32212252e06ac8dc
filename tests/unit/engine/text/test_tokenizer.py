"""The tokenizer gives what transformers gives, and refuses what it cannot read."""

from pathlib import Path

import pytest
from support.models.tokenizers import write_tokenizer
from transformers import AutoTokenizer

from loraplex.engine.errors import PromptRejected, UnsupportedModel
from loraplex.engine.text.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "The quick brown fox",
    "  two  spaces\n\nand\ttabs ",
    "naïve café, 日本語, \U0001f469‍\U0001f4bb e\u0301",
    "</s> in the middle <s>",
    "SELECT * FROM t;" * 40,
]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A <test> & more."},
    {"role": "user", "content": "Say it again."},
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ raise_exception('no tools here') }}{% endif %}\n"
    "    {% generation %}\n"
    "<|{{ m.role }}|>{{ m.content | trim }}{{ {'a': '<é>'} | tojson }}\n"
    "    {% endgeneration %}\n"
    "{% if loop.index > 10 %}{% break %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if mood is defined %}{{ mood }}{% endif %}"
    "{% endif %}"
)


@pytest.mark.parametrize("add_bos", [True, False])
def test_ids_and_text_equal_those_of_transformers(tmp_path: Path, add_bos: bool) -> None:
    folder = write_tokenizer(tmp_path, add_bos=add_bos)
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)

    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(
            text, add_special_tokens=False
        )
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_ids_of_the_demo_model_equal_those_of_transformers(demo_model: Path) -> None:
    ours, theirs = Tokenizer.from_folder(demo_model), AutoTokenizer.from_pretrained(demo_model)

    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_models_own_template_renders_as_in_transformers(
    tmp_path: Path, add_generation_prompt: bool
) -> None:
    folder = write_tokenizer(tmp_path, chat_template=TEMPLATE)
    theirs = AutoTokenizer.from_pretrained(folder)

    text = Tokenizer.from_folder(folder).render_chat(
        MESSAGES, add_generation_prompt=add_generation_prompt, variables={"mood": "calm"}
    )

    assert text == theirs.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt, mood="calm"
    )


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, chat_template="from the config")
    (folder / "chat_template.jinja").write_text("from the file")

    assert Tokenizer.from_folder(folder).render_chat(MESSAGES) == "from the file"


@pytest.mark.parametrize(("add_bos", "start"), [(True, "<s>"), (False, "")])
def test_a_model_without_a_template_gets_the_documented_one(
    tmp_path: Path, add_bos: bool, start: str
) -> None:
    tokenizer = Tokenizer.from_folder(write_tokenizer(tmp_path, add_bos=add_bos))

    assert tokenizer.render_chat(MESSAGES) == (
        start + "Be brief.\n\n### User:\nWho are you?\n\n### Assistant:\nA <test> & more.\n\n"
        "### User:\nSay it again.\n\n### Assistant:\n"
    )
    assert tokenizer.default_stop == ("\n### User:", "\n### Assistant:")


def test_a_model_with_a_template_ends_its_turns_itself(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_tokenizer(tmp_path, chat_template=TEMPLATE))

    assert tokenizer.default_stop == ()


@pytest.mark.parametrize(
    ("template", "message", "said"),
    [
        (None, {"role": "judge", "content": "x"}, "Unknown role: judge"),
        (TEMPLATE, {"role": "tool", "content": "x"}, "no tools here"),
        ("{{ messages[7].content }}", {"role": "user", "content": "x"}, "has no element 7"),
        ("{{ 1 / 0 }}", {"role": "user", "content": "x"}, "ZeroDivisionError"),
        ("{{ messages.__class__.mro() }}", {"role": "user", "content": "x"}, "unsafe"),
    ],
)
def test_messages_that_a_template_cannot_render_are_refused(
    tmp_path: Path, template: str | None, message: dict[str, str], said: str
) -> None:
    tokenizer = Tokenizer.from_folder(write_tokenizer(tmp_path, chat_template=template))

    with pytest.raises(PromptRejected, match=said):
        tokenizer.render_chat([message])


def test_a_caller_cannot_replace_what_the_template_is_given(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_tokenizer(tmp_path))

    with pytest.raises(PromptRejected, match="raise_exception"):
        tokenizer.render_chat(MESSAGES, variables={"raise_exception": "x"})


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_tokenizer(tmp_path))

    with pytest.raises(PromptRejected, match="surrogate"):
        tokenizer.encode("a \ud83d b")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", None),
        ("tokenizer_config.json", "not json"),
        ("tokenizer_config.json", "[]"),
        ("chat_template.jinja", "{% for %}"),
    ],
)
def test_a_broken_folder_is_refused_by_name(tmp_path: Path, name: str, content: str | None) -> None:
    folder = write_tokenizer(tmp_path)
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_text(content)

    with pytest.raises(UnsupportedModel):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("added", ['{"x": {"content": "<a>"}}', '{"3": {}}', "7"])
def test_added_tokens_of_another_form_are_refused_with_the_file(tmp_path: Path, added: str) -> None:
    folder = write_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text(f'{{"added_tokens_decoder": {added}}}')

    with pytest.raises(UnsupportedModel, match=r"Cannot use .*tokenizer_config\.json"):
        Tokenizer.from_folder(folder)
