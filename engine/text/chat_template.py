"""ChatTemplate: messages to prompt text, by the model's own Jinja template. Torch-free."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loraplex.engine.errors import PromptRejected, UnsupportedModel

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


class _GenerationBlock(jinja2.ext.Extension):
    """Lets `{% generation %}` through: training marks the assistant's tokens with it."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a set

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template.

    Args:
        source: the Jinja text, sandboxed when it runs.
        variables: what the template may name besides its arguments, such as `bos_token`.

    Raises:
        UnsupportedModel: if the text is not a valid template.
    """

    def __init__(self, source: str, variables: Mapping[str, object]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UnsupportedModel(f"The model's chat template is broken: {error}") from error
        self._variables = dict(variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, object],
        now: datetime,
    ) -> str:
        """Raises PromptRejected if the template refuses these messages."""
        if taken := RESERVED_NAMES & variables.keys():
            raise PromptRejected(f"The template sets {', '.join(sorted(taken))} itself.")
        values = {**self._variables, **variables}
        values |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        values["strftime_now"] = now.strftime
        try:
            return self._template.render(values)
        except jinja2.TemplateError as error:
            raise PromptRejected(f"The chat template refused the messages: {error}") from error
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise PromptRejected(
                "The chat template cannot render these messages: "
                f"it failed with {type(error).__name__}."
            ) from error


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
