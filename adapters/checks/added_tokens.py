"""Finds tokens that an adapter adds to the base model's vocabulary. Torch-free."""

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from loraplex.adapters.errors import AdapterRejected, listed
from loraplex.adapters.folder import AdapterFolder, size_of

MAX_FILE_BYTES = 64 << 20

T = TypeVar("T")


class _Token(msgspec.Struct):
    content: str
    id: int = -1


class _TokenizerConfig(msgspec.Struct):
    added_tokens_decoder: dict[int, _Token] = {}


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_Token] = []


def added_tokens(folder: AdapterFolder) -> dict[str, int]:
    """Returns every added token, with its id, that the tokenizer files of a folder name.

    Raises:
        AdapterRejected: one of the files is no regular file, is too large, or cannot be understood.
    """
    found = dict(_read(folder, "added_tokens.json", dict[str, int]) or {})
    config = _read(folder, "tokenizer_config.json", _TokenizerConfig)
    tokenizer = _read(folder, "tokenizer.json", _Tokenizer)
    if config is not None:
        found |= {token.content: number for number, token in config.added_tokens_decoder.items()}
    if tokenizer is not None:
        found |= {token.content: token.id for token in tokenizer.added_tokens}
    return found


def vocabulary_faults(
    tokens: Mapping[str, int], vocab_size: int, known: Mapping[str, int]
) -> list[str]:
    """Returns the faults of added tokens: ids without a row in the embedding. `known`: the tokens
    that the base model's own tokenizer has."""
    beyond = [
        f"{token} ({number})"
        for token, number in sorted(tokens.items(), key=lambda item: item[1])
        if number >= vocab_size and known.get(token) != number
    ]
    if not beyond:
        return []
    return [
        f"added tokens beyond the base model's vocabulary of {vocab_size} are not supported: "
        f"{listed(beyond)}"
    ]


def _read(folder: AdapterFolder, name: str, kind: type[T]) -> T | None:
    file = folder.open(name)
    if file is None:
        return None
    with file:
        if size_of(file) > MAX_FILE_BYTES:
            raise AdapterRejected([f"{name} is larger than {MAX_FILE_BYTES} bytes"])
        raw = file.read(MAX_FILE_BYTES)
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise AdapterRejected([f"{name} cannot be understood: {error}"]) from error
