"""Where each token of a text begins, as a reader counts characters."""

import pytest
from support.models.word_tokenizer import byte_fallback_tokenizer, byte_tokenizer
from tokenizers import Tokenizer

from loraplex.engine.text.text_offsets import TextOffsets, offsets_in

BYTE, FALLBACK = byte_tokenizer(), byte_fallback_tokenizer()


def in_text(tokenizer: Tokenizer, text: str) -> list[tuple[str | None, int]]:
    ids = tokenizer.encode(text).ids
    offsets = offsets_in(tokenizer, ids, text)
    return list(zip(map(tokenizer.id_to_token, ids), offsets, strict=True))


@pytest.mark.parametrize("tokenizer", [BYTE, FALLBACK])
def test_all_tokens_of_a_character_begin_where_it_does(tokenizer: Tokenizer) -> None:
    offsets = [offset for _, offset in in_text(tokenizer, "b \U00013000 b")]

    assert (offsets[0], offsets[1]) == (0, 1)
    assert offsets[2:-2] == [2] * (len(offsets) - 4)  # of four bytes, or of what is merged
    assert offsets[-2:] == [3, 4]


def test_a_special_token_takes_room_where_the_text_shows_it() -> None:
    ids = [0, *BYTE.encode("a").ids, 0, *BYTE.encode("b").ids]

    assert offsets_in(BYTE, ids, "a<s>b") == [0, 0, 1, 4]
    assert offsets_in(BYTE, ids, "<s>a<s>b") == [0, 3, 4, 7]
    assert offsets_in(BYTE, ids, "ab") == [0, 0, 1, 1]


@pytest.mark.parametrize(("skip", "expected"), [(True, [0, 0, 2]), (False, [0, 3, 5])])
def test_an_answer_is_followed_behind_its_prompt(skip: bool, expected: list[int]) -> None:
    a = BYTE.encode(" a").ids
    offsets = TextOffsets(BYTE, BYTE.encode("hel").ids, skip_special_tokens=skip)

    assert [offsets.add(token) for token in (0, *a, *a)] == expected
