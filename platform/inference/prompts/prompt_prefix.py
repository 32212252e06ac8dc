"""PromptPrefix: the base prompt of a call, and how it is put before the call's own prompt."""

from dataclasses import dataclass
from typing import Any

from loraplex.engine.text.message_content import text_of
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.catalog.base_prompts import BasePrompt, Messages


@dataclass(frozen=True)
class PromptPrefix:
    """A base prompt that comes first: always if the request names it, and if it is the model's own,
    unless the call's prompt already begins with it."""

    prompt: BasePrompt
    is_named: bool

    def chat(self, own: list[dict[str, Any]]) -> Messages:
        base = list(self.prompt.source.messages)
        is_there = not self.is_named and _texts(own[: len(base)]) == _texts(base)
        return own if is_there else [*base, *own]

    def completion(self, tokenizer: Tokenizer, own: str | list[int]) -> list[int]:
        """Returns the tokens of a prompt, whose own part is tokenised without special tokens."""
        base = self.prompt.token_ids
        if isinstance(own, str):
            rest = own if self.is_named else own.removeprefix(self.prompt.source.text)
            return [*base, *tokenizer.encode(rest, add_special_tokens=False)]
        is_there = not self.is_named and own[: len(base)] == base
        return own if is_there else [*base, *own]


def _texts(messages: Messages) -> Messages:
    """Returns the messages with their parts joined, so that both forms of content compare equal."""
    return [{**message, "content": text_of(message["content"])} for message in messages]
