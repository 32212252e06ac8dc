"""A text that cannot fit is refused after little work, and no other text is."""

from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers

from loraplex.engine.errors import PromptTooLong
from loraplex.engine.text.encoding_bounds import PIECE, EncodingBounds, characters_per_token
from loraplex.engine.text.tokenizer import Tokenizer

LONGEST = "abcdefgh"


def backend(byte_fallback: bool = True, has_bytes: bool = True) -> Backend:
    letters = {letter: number for number, letter in enumerate(LONGEST)}
    merges, whole = [], LONGEST[0]
    for letter in LONGEST[1:]:
        merges.append((whole, letter))
        whole += letter
        letters[whole] = len(letters)
    alphabet = pre_tokenizers.ByteLevel.alphabet() if has_bytes else []
    for byte in (*alphabet, *(f"<0x{it:02X}>" for it in range(256 if has_bytes else 0))):
        letters.setdefault(byte, len(letters))
    model = models.BPE(letters, merges, byte_fallback=byte_fallback)
    return Backend(model)


def never() -> bool:
    return False


def test_a_text_that_cannot_fit_is_not_looked_at() -> None:
    bounds = EncodingBounds(max_tokens=10, characters_per_token=8, is_unwanted=never)
    counted: list[str] = []

    with pytest.raises(PromptTooLong) as caught:
        bounds.check("x" * 81, lambda piece: len(counted.append(piece) or ""))

    assert (caught.value.max_tokens, caught.value.at_least) == (10, 11)
    assert counted == []


def test_a_text_of_more_tokens_than_fit_is_counted_only_until_that_shows() -> None:
    bounds = EncodingBounds(max_tokens=PIECE, characters_per_token=128, is_unwanted=never)
    counted: list[str] = []

    def count(piece: str) -> int:
        counted.append(piece)
        return len(piece)

    with pytest.raises(PromptTooLong):
        bounds.check("x" * (100 * PIECE), count)

    assert len(counted) == 3


def test_work_that_nobody_wants_ends_between_pieces() -> None:
    asked = iter([False, False, True])
    bounds = EncodingBounds(PIECE, 128, is_unwanted=lambda: next(asked))
    counted: list[str] = []

    def count(piece: str) -> int:
        counted.append(piece)
        return 1

    with pytest.raises(CancelledError):
        bounds.check("x" * (100 * PIECE), count)

    assert len(counted) == 2


def test_the_largest_text_that_fits_is_encoded() -> None:
    tokenizer = Tokenizer(backend(), {}, {})
    text = LONGEST * 10_000

    assert len(tokenizer.within(10_000, never).encode(text)) == 10_000
    with pytest.raises(PromptTooLong):
        tokenizer.within(9_999, never).encode(text)
    assert len(tokenizer.encode(text)) == 10_000


@pytest.mark.parametrize(
    ("normalizer", "splitter", "most"),
    [
        (None, None, 8),
        (normalizers.Replace(" ", "_"), pre_tokenizers.Split(" ", "merged_with_previous"), 8),
        (normalizers.NFC(), pre_tokenizers.ByteLevel(), 32),
        (normalizers.Replace("aa", "a"), None, 128),
        (normalizers.Strip(), None, 128),
        (None, pre_tokenizers.Split(" ", "removed"), 128),
        (None, pre_tokenizers.WhitespaceSplit(), 128),
    ],
)
def test_what_drops_characters_has_a_larger_bound(
    normalizer: normalizers.Normalizer | None,
    splitter: pre_tokenizers.PreTokenizer | None,
    most: int,
) -> None:
    made = backend()
    if normalizer is not None:
        made.normalizer = normalizer
    if splitter is not None:
        made.pre_tokenizer = splitter

    assert characters_per_token(made) == most


def test_unknown_characters_may_vanish_without_bytes_to_fall_back_on() -> None:
    assert characters_per_token(backend(byte_fallback=False)) == 128
    assert characters_per_token(backend(has_bytes=False)) == 128


def test_a_checkpoint_s_tokenizer_has_a_bound(tmp_path: Path) -> None:
    backend().save(str(tmp_path / "tokenizer.json"))

    tokenizer = Tokenizer.from_folder(tmp_path)

    with pytest.raises(PromptTooLong):
        tokenizer.within(1, never).encode(LONGEST * 2)
