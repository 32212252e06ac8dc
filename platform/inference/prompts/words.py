"""Checks and tokenises the texts that a caller gives about the answer."""

import asyncio
from collections.abc import Sequence

from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.errors import InvalidRequest


async def bad_sequences(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of each word at the start of a text and after a space."""
    return await asyncio.to_thread(_bad_sequences, tokenizer, words) if words else ()


def _bad_sequences(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    forms = (form for word in words for form in (word, f" {word.lstrip()}"))
    found = (tuple(tokenizer.encode(form, add_special_tokens=False)) for form in forms)
    return tuple(dict.fromkeys(tokens for tokens in found if tokens))


def refuse_hidden_stops(tokenizer: Tokenizer, stop: Sequence[str]) -> None:
    """Raises InvalidRequest for special tokens within longer stop strings, which never match."""
    for text in stop:
        special = tokenizer.special_in(text)
        if special is not None and special != text:
            raise InvalidRequest(
                f"stop: the text never holds the special token {special!r}. Give it as a stop "
                "string by itself or in stop_token_ids, or set skip_special_tokens to false.",
                "stop",
            )


def refuse_foreign_template(tokenizer: Tokenizer, template: str | None) -> None:
    """Raises InvalidRequest unless the chat template is one of the model's own, by name."""
    if template is not None and template not in tokenizer.templates:
        names = ", ".join(sorted(tokenizer.templates))
        raise InvalidRequest(
            "chat_template must name one of the model's templates, since this server accepts no "
            f"templates from requests. The model's templates are: {names}.",
            "chat_template",
        )
