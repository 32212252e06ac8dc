"""Messages become the text that transformers makes of them, in whatever form they came."""

from pathlib import Path
from typing import Any

import pytest
from support.models.tokenizers import write_tokenizer
from transformers import AutoTokenizer

from loraplex.engine.errors import PromptRejected, UnsupportedModel
from loraplex.engine.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "Hello"}
PARTS = {"role": "user", "content": [{"type": "text", "text": t} for t in ("One. ", "Two.")]}
TEXT_ONLY = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
PARTS_ONLY = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}"
    "{% if part['type'] == 'text' %}[{{ part['text'] }}]{% endif %}{% endfor %}{% endfor %}"
)
BOTH = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part['text'] }}]{% endfor %}{% endif %}{% endfor %}"
)
PARTS_OF_USERS = (
    "{% if messages[0].role == 'system' %}{{ '<system>' + messages[0].content }}"
    "{% set messages = messages[1:] %}{% endif %}" + BOTH
)
AS_JSON = "{% for m in messages %}{{ m | tojson }}{% endfor %}"


def tokenizer_with(folder: Path, template: Any) -> Tokenizer:
    return Tokenizer.from_folder(write_tokenizer(folder, chat_template=template))


@pytest.mark.parametrize(
    ("template", "message", "text"),
    [
        (TEXT_ONLY, USER, "<user>Hello"),
        (TEXT_ONLY, PARTS, "<user>One. Two."),
        (PARTS_ONLY, USER, "<user>[Hello]"),
        (PARTS_ONLY, PARTS, "<user>[One. ][Two.]"),
        (BOTH, USER, "<user>Hello"),
        (BOTH, PARTS, "<user>[One. ][Two.]"),
        (AS_JSON, PARTS, '{"role": "user", "content": "One. Two."}'),
    ],
)
def test_content_comes_in_the_form_that_the_template_takes(
    tmp_path: Path, template: str, message: dict[str, Any], text: str
) -> None:
    assert tokenizer_with(tmp_path, template).render_chat([message]) == text


def test_the_form_is_found_for_each_role(tmp_path: Path) -> None:
    system = {**PARTS, "role": "system"}

    text = tokenizer_with(tmp_path, PARTS_OF_USERS).render_chat([system, PARTS])

    assert text == "<system>One. Two.<user>[One. ][Two.]"


@pytest.mark.parametrize(
    "template",
    [
        "{% if tools is not none %}tools{% endif %}{% if documents is not none %}docs{% endif %}.",
        "{% if tools is none and documents is none %}neither{% endif %}",
    ],
)
def test_what_is_not_given_is_none_as_in_transformers(tmp_path: Path, template: str) -> None:
    ours = tokenizer_with(tmp_path, template)
    theirs = AutoTokenizer.from_pretrained(tmp_path)

    assert ours.render_chat([USER]) == theirs.apply_chat_template([USER], tokenize=False)


@pytest.mark.parametrize("content", ["Once upon ", "Once", " Once \n", ""])
@pytest.mark.parametrize("shown", ["{{ m.content }}", "{{ m.content | trim }}"])
def test_a_prompt_can_end_within_the_last_message(tmp_path: Path, shown: str, content: str) -> None:
    template = "{% for m in messages %}<{{ m.role }}>" + shown + "</s>\n{% endfor %}"
    ours = tokenizer_with(tmp_path, template)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    chat = [USER, {"role": "assistant", "content": content}]

    text = ours.render_chat(chat, add_generation_prompt=False, continues_last=True)

    assert text == theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)


def test_a_message_that_is_not_shown_cannot_be_continued(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, "{{ messages[0].content }}")
    chat = [USER, {"role": "assistant", "content": "Once"}]

    with pytest.raises(PromptRejected, match="does not show the message to continue"):
        tokenizer.render_chat(chat, continues_last=True)


NAMED = [{"name": "rag", "template": "rag"}, {"name": "tool_use", "template": "tools"}]


def test_of_several_templates_the_default_one_is_used(tmp_path: Path) -> None:
    default = {"name": "default", "template": "default"}

    assert tokenizer_with(tmp_path, [*NAMED, default]).render_chat([USER]) == "default"


def test_without_a_default_one_has_to_be_named(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, NAMED)

    with pytest.raises(PromptRejected, match=r"none by default.*: rag, tool_use\."):
        tokenizer.render_chat([USER])
    assert tokenizer.render_chat([USER], template="rag") == "rag"


def test_templates_in_files_beside_the_default_can_be_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template="default")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag from a file")

    assert Tokenizer.from_folder(tmp_path).render_chat([USER], template="rag") == "rag from a file"


@pytest.mark.parametrize("template", [[{"template": "x"}], [{"name": "x"}], ["x"], 7])
def test_templates_of_another_form_are_refused_by_file(tmp_path: Path, template: object) -> None:
    with pytest.raises(UnsupportedModel, match="tokenizer_config"):
        tokenizer_with(tmp_path, template)


def test_a_template_that_is_no_text_is_refused_by_file(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")

    with pytest.raises(UnsupportedModel, match=r"chat_template\.jinja"):
        Tokenizer.from_folder(tmp_path)
