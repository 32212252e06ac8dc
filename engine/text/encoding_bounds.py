"""EncodingBounds: limits the work on a text to what a prompt that fits can need. Torch-free."""

import json
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel

from loraplex.engine.errors import PromptTooLong

PIECE = 2**14  # characters that are counted at once
USUAL_CHARACTERS = 8  # per token; texts with more are counted before they are encoded as a whole
# Of tokenizers that drop characters or take any number of them into one token.
MOST_CHARACTERS = 128
MAX_COMPOSED = 4  # characters that Unicode's normal forms turn into one

KEEPS_ALL = {"ByteLevel", "Metaspace", "Digits"}  # of pre-tokenizers
SPLITS = {"Split", "Punctuation"}
COMPOSES = {"NFC", "NFD", "NFKC", "NFKD"}


@dataclass(frozen=True)
class EncodingBounds:
    """The bounds of one call.

    Args:
        max_tokens: what fits.
        characters_per_token: most that one token stands for.
        is_unwanted: asked between pieces of work.
    """

    max_tokens: int
    characters_per_token: int
    is_unwanted: Callable[[], bool]

    def check(self, text: str, count: Callable[[str], int]) -> None:
        """Counts the tokens of an unusually long text piece by piece. Pieces have a few more tokens
        than the whole; with twice as many as fit, the whole does not fit either.

        Raises:
            PromptTooLong: if the text cannot fit.
            CancelledError: if nobody wants it any more.
        """
        if self.is_unwanted():
            raise CancelledError
        at_least = -(-len(text) // self.characters_per_token)
        if at_least > self.max_tokens:
            raise PromptTooLong(self.max_tokens, at_least)
        if len(text) <= max(2 * PIECE, USUAL_CHARACTERS * self.max_tokens):
            return
        num_tokens = 0
        for start in range(0, len(text), PIECE):
            num_tokens += count(text[start : start + PIECE])
            if num_tokens > 2 * self.max_tokens:
                raise PromptTooLong(self.max_tokens, num_tokens // 2)
            if self.is_unwanted():
                raise CancelledError


def characters_per_token(backend: Backend) -> int:
    """Returns the most characters of a text that one token stands for."""
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
    shrinks = _shrinkage(_state(backend.normalizer))
    if shrinks is None or not _keeps_all(backend):
        return max(longest, MOST_CHARACTERS)
    return longest * shrinks


def _keeps_all(backend: Backend) -> bool:
    """Returns whether every character of a normalised text ends up in a token."""
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return False
    splitter = _state(backend.pre_tokenizer)
    parts = _parts(splitter, "pretokenizers")
    if not all(
        part["type"] in KEEPS_ALL or (part["type"] in SPLITS and part["behavior"] != "Removed")
        for part in parts
    ):
        return False
    is_byte_level = any(part["type"] == "ByteLevel" for part in parts)
    if type(backend.model).__name__ != "BPE" or not (is_byte_level or backend.model.byte_fallback):
        return False
    bytes_ = ByteLevel.alphabet() if is_byte_level else [f"<0x{it:02X}>" for it in range(256)]
    return all(backend.token_to_id(byte) is not None for byte in bytes_)


def _shrinkage(normalizer: dict[str, Any] | None) -> int | None:
    """Returns how many characters it may turn into one; None where that is unbounded."""
    factor = 1
    for part in _parts(normalizer, "normalizers"):
        kind = part["type"]
        if kind in COMPOSES:
            factor *= MAX_COMPOSED
        elif kind == "Replace":
            pattern = part["pattern"].get("String")
            if pattern is None or len(pattern) > len(part["content"]):
                return None
        elif kind not in {"Prepend", "Lowercase", "ByteLevel"}:
            return None
    return factor


def _parts(state: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if state is None:
        return []
    if state["type"] != "Sequence":
        return [state]
    return [part for inner in state[name] for part in _parts(inner, name)]


def _state(component: Any) -> dict[str, Any] | None:
    """As in tokenizer.json."""
    if component is None:
        return None
    state: dict[str, Any] = json.loads(component.__getstate__())
    return state
