"""ChatTemplate: renders messages to prompt text with the model's own Jinja template. Torch-free.

A template is a program of unknown origin: `TemplateProcesses` runs it within limits.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loraplex.engine.text.message_content import MessageContent, Messages, text_of

# For a base model without a template. Documented in docs/api.md; training examples use it too.
DEFAULT_CHAT_TEMPLATE = (
    "{{ bos_token if adds_bos else '' }}"
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% elif message.role == 'user' %}### User:\n{{ message.content }}\n\n"
    "{% elif message.role == 'assistant' %}### Assistant:\n{{ message.content }}\n\n"
    "{% else %}{{ raise_exception('Unknown role: ' + message.role) }}{% endif %}"
    "{% endfor %}"
    "{{ '### Assistant:\n' if add_generation_prompt else '' }}"
)
DEFAULT_STOP = ("\n### User:", "\n### Assistant:")

RESERVED_NAMES = frozenset(
    {"messages", "add_generation_prompt", "raise_exception", "strftime_now", "adds_bos"}
)
NOT_GIVEN = {"tools": None, "documents": None}  # templates ask whether they are none
END_MARK = "qvxend "  # ends the message to continue; the blank shows whether the template trims it


class TemplateBroken(Exception):
    """Raised for a text that is no template; the message says where."""


class TemplateRefused(Exception):
    """Raised where the template refuses these messages; the message says why, fit for a caller."""


@dataclass(frozen=True)
class Chat:
    """The input of one rendering."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool
    variables: Mapping[str, object]  # more names for the template, such as `bos_token`
    now: datetime
    continues_last: bool = False  # the prompt ends within the last message


class _GenerationBlock(jinja2.ext.Extension):
    """Accepts `{% generation %}`, with which training marks the assistant's tokens."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a set

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template, which runs in a sandbox.

    Raises:
        TemplateBroken: if the text is not a valid template.
    """

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateBroken(str(error)) from error
        self._content: MessageContent | None = None

    def render(self, chat: Chat) -> str:
        """Raises TemplateRefused if the template refuses these messages."""
        if self._content is None:
            probe = replace(chat, messages=(), add_generation_prompt=True)
            self._content = MessageContent(
                lambda tried: self._render(replace(probe, messages=tried))
            )
        messages = self._content.adapt(chat.messages)
        if not chat.continues_last:
            return self._render(replace(chat, messages=messages))
        return self._render_open(replace(chat, messages=messages), messages)

    def _render_open(self, chat: Chat, messages: Messages) -> str:
        """Renders up to the end of the last message, without what the template puts behind it."""
        *before, last = messages
        content = last["content"]
        if isinstance(content, list):
            *parts, end = content
            marked: object = [*parts, {**end, "text": end["text"] + END_MARK}]
        else:
            marked = text_of(content) + END_MARK
        text = self._render(replace(chat, messages=[*before, {**last, "content": marked}]))
        end_of_text, mark, _ = text.rpartition(END_MARK.strip())
        if not mark:
            raise TemplateRefused("The chat template does not show the message to continue.")
        is_trimmed = not text.startswith(END_MARK, len(end_of_text))
        return end_of_text.rstrip() if is_trimmed else end_of_text

    def _render(self, chat: Chat) -> str:
        values = {**NOT_GIVEN, **chat.variables, "messages": chat.messages}
        values["add_generation_prompt"] = chat.add_generation_prompt
        values["strftime_now"] = chat.now.strftime
        try:
            return self._template.render(values)
        except jinja2.TemplateError as error:
            raise TemplateRefused(f"The chat template refused the messages: {error}") from error
        except MemoryError as error:
            message = "The chat template needs too much memory for these messages."
            raise TemplateRefused(message) from error
        except Exception as error:
            raise TemplateRefused(
                "The chat template cannot render these messages: "
                f"it failed with {type(error).__name__}."
            ) from error


def check_syntax(source: str) -> None:
    """Parses a template without running any of it.

    Raises:
        TemplateBroken: if the text is not a valid template.
    """
    environment = ImmutableSandboxedEnvironment(
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    try:
        environment.parse(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise TemplateBroken(str(error)) from error


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(  # Jinja's own escapes HTML characters
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
