"""What a token looks like when it stands alone."""

import pytest
from support.models.word_tokenizer import byte_fallback_tokenizer, byte_tokenizer, word_tokenizer
from tokenizers import Tokenizer

from loraplex.engine.text.token_text import TokenText

BYTE, FALLBACK, WORD = byte_tokenizer(), byte_fallback_tokenizer(), word_tokenizer()


def described(tokenizer: Tokenizer, piece: str) -> tuple[str, list[int]]:
    return TokenText(tokenizer).describe(tokenizer.token_to_id(piece))


@pytest.mark.parametrize(
    ("tokenizer", "piece", "text"),
    [
        (BYTE, "hel", "hel"),
        (BYTE, "\u0120a", " a"),
        (FALLBACK, "a", "a"),
        (FALLBACK, "\u2581a", " a"),
        (FALLBACK, "\u2581", " "),
        (FALLBACK, "\u2581\u2581", "  "),
        (FALLBACK, "\u2581\u2581a", "  a"),
        (FALLBACK, "<0x41>", "A"),
        (WORD, "cat", "cat"),
        (BYTE, "<s>", "<s>"),
        (FALLBACK, "<s>", "<s>"),
    ],
)
def test_a_whole_token_has_its_text_and_the_bytes_of_it(
    tokenizer: Tokenizer, piece: str, text: str
) -> None:
    assert described(tokenizer, piece) == (text, list(text.encode()))


@pytest.mark.parametrize(("tokenizer", "piece"), [(BYTE, "\u00f0"), (FALLBACK, "<0xF0>")])
def test_a_part_of_a_character_has_its_byte(tokenizer: Tokenizer, piece: str) -> None:
    assert described(tokenizer, piece)[1] == [0xF0]


@pytest.mark.parametrize("tokenizer", [BYTE, FALLBACK])
def test_the_bytes_of_tokens_joined_are_the_text(tokenizer: Tokenizer) -> None:
    text = "a \U0001f600 \u65e5 hello"
    tokens = TokenText(tokenizer)

    joined = [b for token in tokenizer.encode(text).ids for b in tokens.describe(token)[1]]

    assert bytes(joined).decode() == text


def test_a_token_beyond_the_tokenizers_vocabulary_is_empty() -> None:
    assert TokenText(WORD).describe(10_000) == ("", [])
