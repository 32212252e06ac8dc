"""MessageContent: finds out whether a chat template takes a message's content as text or as
parts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Message = Mapping[str, Any]
Messages = list[dict[str, Any]]

# Two texts that no template holds: of content that is shown as it should be, both are there.
FIRST, SECOND = "qvxfirst", "qvxsecond"


class Takes(NamedTuple):
    """What a template does with the content of one role's messages."""

    text: bool
    parts: bool


class MessageContent:
    """Tries each role once, and converts messages into a form that the template takes.

    Args:
        render: one chat's text; may raise anything where the template refuses it.
    """

    def __init__(self, render: Callable[[Messages], str]) -> None:
        self._render = render
        self._known: dict[str, Takes] = {}

    def adapt(self, messages: Sequence[Message]) -> Messages:
        """Returns the same messages, with parts where the template takes them and one text
        otherwise, or the reverse."""
        return [self._adapt(message) for message in messages]

    def _adapt(self, message: Message) -> dict[str, Any]:
        content = message.get("content")
        if not isinstance(content, str | list):
            return dict(message)
        takes = self._takes(str(message.get("role")))
        if isinstance(content, list) and not takes.parts:
            return {**message, "content": text_of(content)}
        if isinstance(content, str) and takes.parts and not takes.text:
            return {**message, "content": [_part(content)]}
        return dict(message)

    def _takes(self, role: str) -> Takes:
        if role not in self._known:
            self._known[role] = Takes(
                text=self._shows(role, FIRST + SECOND, FIRST + SECOND),
                parts=self._shows(role, [_part(FIRST), _part(SECOND)], None),
            )
        return self._known[role]

    def _shows(self, role: str, content: object, whole: str | None) -> bool:
        message = {"role": role, "content": content}
        chat = [message]
        if role == "system":
            chat = [message, self._adapt({"role": "user", "content": "x"})]
        elif role != "user":
            chat = [self._adapt({"role": "user", "content": "x"}), message]
        try:
            text = self._render(chat)
        except Exception:  # the template refuses it, in whatever way
            return False
        if whole is not None:
            return whole in text
        _, first, rest = text.partition(FIRST)
        between, second, _ = rest.partition(SECOND)
        return bool(first and second) and "type" not in between  # no list written out


def text_of(content: object) -> str:
    """Returns a message's content as one text, whichever form it has."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return str(content)


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
