"""TokenText: the text of a single token, for log-probabilities."""

import re

from tokenizers import Tokenizer

from loraplex.engine.protocol import PositionLogprobs, TokenLogprob
from loraplex.engine.step import Logprobs

SPACE = "\u2581"  # as SentencePiece writes it
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Returns byte-level BPE's stand-in for each byte: itself where printable, otherwise from
    U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class TokenText:
    """Text and bytes of tokens, each taken alone: a part of a character has only bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._alphabet = _byte_level_alphabet() if "ByteLevel" in repr(tokenizer.decoder) else None
        self._known: dict[int, tuple[str, list[int]]] = {}

    def describe(self, token_id: int) -> tuple[str, list[int]]:
        """Returns (text, UTF-8 bytes)."""
        if token_id not in self._known:
            self._known[token_id] = self._describe(token_id)
        return self._known[token_id]

    def with_text(self, logprobs: Logprobs) -> PositionLogprobs:
        """Returns log-probabilities as callers see them."""
        own = self._entry(logprobs.token_id, logprobs.logprob, logprobs.rank)
        top = [self._entry(*pair, rank) for rank, pair in enumerate(logprobs.top, start=1)]
        return PositionLogprobs(own, top)

    def _entry(self, token_id: int, logprob: float, rank: int) -> TokenLogprob:
        return TokenLogprob(token_id, logprob, *self.describe(token_id), rank)

    def _describe(self, token_id: int) -> tuple[str, list[int]]:
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:  # the model's vocabulary is padded beyond the tokenizer's
            return "", []
        text = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        num_spaces = len(piece) - len(piece.lstrip(SPACE))
        if not text.startswith(" " * num_spaces):  # the decoder takes one from a text's start
            text = " " + text
        return text, self._bytes(piece, text)

    def _bytes(self, piece: str, text: str) -> list[int]:
        if match := _BYTE_TOKEN.fullmatch(piece):
            return [int(match[1], 16)]
        alphabet = self._alphabet
        if alphabet is not None and all(char in alphabet for char in piece):
            return [alphabet[char] for char in piece]
        return list(text.encode())
