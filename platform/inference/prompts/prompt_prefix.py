"""PromptPrefix: the base prompt of a call, and what it is put before."""

from dataclasses import dataclass
from typing import Any

from loraplex.engine.text.message_content import text_of
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.catalog.base_prompts import BasePrompt, Messages


@dataclass(frozen=True)
class PromptPrefix:
    """A prompt that the request names is put before what it sends in any case; its model's own only
    where that does not begin with it already."""

    prompt: BasePrompt
    is_named: bool

    def chat(self, own: list[dict[str, Any]]) -> Messages:
        base = list(self.prompt.source.messages)
        is_there = not self.is_named and _texts(own[: len(base)]) == _texts(base)
        return own if is_there else [*base, *own]

    def completion(self, tokenizer: Tokenizer, own: str | list[int]) -> list[int]:
        """What is behind the prompt is tokenised by itself, and without special tokens."""
        base = self.prompt.token_ids
        if isinstance(own, str):
            rest = own if self.is_named else own.removeprefix(self.prompt.source.text)
            return [*base, *tokenizer.encode(rest, add_special_tokens=False)]
        is_there = not self.is_named and own[: len(base)] == base
        return own if is_there else [*base, *own]


def _texts(messages: Messages) -> Messages:
    """The same for content that comes as one text and as parts."""
    return [{**message, "content": text_of(message["content"])} for message in messages]
