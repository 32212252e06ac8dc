"""Whatever a template does, it ends soon, and the next chat is rendered."""

import os
import time
from collections.abc import Iterator
from datetime import datetime

import psutil
import pytest

from loraplex.engine.errors import PromptRejected, UnsupportedModel
from loraplex.engine.text.chat_template import DEFAULT_CHAT_TEMPLATE, Chat
from loraplex.engine.text.template_processes import TemplateProcesses

NOW = datetime(2024, 1, 1)
CHAT = Chat([{"role": "user", "content": "Hello"}], True, {}, NOW)
HONEST = "{{ messages[0].content }}"


def workers() -> list[psutil.Process]:
    """Of this process; tests beside these may have left a server among its children."""
    children = psutil.Process().children()
    return [child for child in children if "template_worker" in " ".join(child.cmdline())]


@pytest.fixture
def templates() -> Iterator[TemplateProcesses]:
    templates = TemplateProcesses()
    yield templates
    templates.close()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "time"),
        ("{{ range(99999) | map('string') | join | replace('1', 'x' * 99999) }}", "memory"),
        ("{{ 'x' * 10 ** 10 }}", "memory"),
        ("{{ 'x'.ljust(10 ** 10) }}", "memory"),
        ("{% set s = namespace(x='xx') %}{% for i in range(40) %}{% set s.x = s.x ~ s.x %}"
         "{% endfor %}{{ s.x }}", "memory|time"),
        ("{{ 7 ** (10 ** 9) }}", "time"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 'x' * 20000000 }}", "20000000 characters"),
    ],
)  # fmt: skip
def test_a_template_beyond_its_limits_is_refused_and_the_next_is_served(
    templates: TemplateProcesses, template: str, said: str
) -> None:
    start = time.monotonic()
    with pytest.raises(PromptRejected, match=said):
        templates.render(template, CHAT)

    assert time.monotonic() - start < 30  # of a machine that may be busy
    assert templates.render(HONEST, CHAT) == "Hello"


def test_a_process_is_used_again(templates: TemplateProcesses) -> None:
    templates.render(HONEST, CHAT)
    before = workers()

    templates.render("another", CHAT)

    assert workers() == before


def test_a_process_that_ended_between_two_chats_is_replaced(templates: TemplateProcesses) -> None:
    templates.render(HONEST, CHAT)
    (process,) = workers()
    process.kill()
    time.sleep(0.05)

    assert templates.render(HONEST, CHAT) == "Hello"


def test_nothing_is_left_of_it_when_it_is_closed(templates: TemplateProcesses) -> None:
    templates.render(HONEST, CHAT)

    templates.close()

    assert workers() == []


def test_no_secret_is_in_its_environment(
    templates: TemplateProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_API_KEY", "secret")
    templates.render(HONEST, CHAT)

    (process,) = workers()

    assert (
        process.environ().keys()
        <= {"PYTHONPATH", "LC_CTYPE"}
        < os.environ.keys()
        | {
            "LC_CTYPE",
            "PYTHONPATH",
        }
    )


def test_a_broken_template_is_told_from_one_that_refuses(templates: TemplateProcesses) -> None:
    with pytest.raises(UnsupportedModel, match="broken"):
        templates.check("{% for %}")
    with pytest.raises(UnsupportedModel, match="No filter named"):
        templates.check("{{ x | unheard_of }}")


def test_a_long_chat_is_no_program_without_an_end(templates: TemplateProcesses) -> None:
    messages = [{"role": "user", "content": "word " * 100}] * 10_000

    text = templates.render(DEFAULT_CHAT_TEMPLATE, Chat(messages, True, {"adds_bos": False}, NOW))

    assert len(text) > 5_000_000
