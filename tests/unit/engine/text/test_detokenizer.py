"""Tokens become text as they come: whole characters, nothing lost, nothing twice."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.models.word_tokenizer import byte_fallback_tokenizer, byte_tokenizer, word_tokenizer
from tokenizers import Tokenizer

from loraplex.engine.text.detokenizer import MAX_OPEN_TOKENS, REPLACEMENT, Detokenizer

WORD, BYTE, FALLBACK = word_tokenizer(), byte_tokenizer(), byte_fallback_tokenizer()
FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467"  # one grapheme of five characters
TEXTS = ["hello", "\U0001f600", FAMILY, "e\u0301", "a \u65e5\u672c b", "na\u00efve"]


def stream(
    tokenizer: Tokenizer,
    token_ids: list[int],
    prompt: tuple[int, ...] = (),
    stop: tuple[str, ...] = (),
) -> list[str]:
    """Every delta of an output that ends with its last token."""
    detokenizer = Detokenizer(tokenizer, list(prompt), stop=stop)
    deltas = []
    for token in token_ids:
        detokenizer.add(token)
        deltas.append(detokenizer.take())
    return [*deltas, detokenizer.flush()]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """The tokens of single bytes, whether or not they make a character."""
    if tokenizer is FALLBACK:
        return [1 + byte for byte in data]
    known = {byte: ids_of(tokenizer, chr(byte)) for byte in range(128)}
    pairs = {0x80: "\u0122", 0x9F: "\u0141", 0xE2: "\u00e2", 0xF0: "\u00f0", 0xFF: "\u00ff"}
    return [known[byte][0] if byte < 128 else tokenizer.token_to_id(pairs[byte]) for byte in data]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", [BYTE, FALLBACK], ids=["byte-level", "byte-fallback"])
def test_no_delta_holds_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    deltas = stream(tokenizer, ids_of(tokenizer, text))

    assert "".join(deltas) == text
    assert not any(REPLACEMENT in delta for delta in deltas)


@pytest.mark.parametrize("tokenizer", [BYTE, FALLBACK], ids=["byte-level", "byte-fallback"])
def test_a_character_comes_out_with_the_token_that_completes_it(tokenizer: Tokenizer) -> None:
    deltas = stream(tokenizer, ids_of(tokenizer, "\u65e5b"))

    assert deltas == ["", "", "\u65e5", "b", ""]


@pytest.mark.parametrize("tokenizer", [BYTE, FALLBACK], ids=["byte-level", "byte-fallback"])
def test_a_cut_character_is_flushed_once_as_the_replacement_character(tokenizer: Tokenizer) -> None:
    cut = ids_of(tokenizer, "a\U0001f600\u65e5")[:-2]

    deltas = stream(tokenizer, cut)

    assert "".join(deltas) == f"a\U0001f600{REPLACEMENT}"
    assert deltas[-1] == REPLACEMENT


@pytest.mark.parametrize("tokenizer", [BYTE, FALLBACK], ids=["byte-level", "byte-fallback"])
def test_an_invalid_byte_spoils_no_character_beside_it(tokenizer: Tokenizer) -> None:
    ids = [*ids_of(tokenizer, "\U0001f600"), *byte_ids(tokenizer, b"\xff"), *ids_of(tokenizer, "b")]

    assert "".join(stream(tokenizer, ids)) == f"\U0001f600{REPLACEMENT}b"


def test_a_byte_that_fits_nowhere_is_given_out_with_the_next_character() -> None:
    assert stream(BYTE, byte_ids(BYTE, b"h\xff\x80o")) == ["h", "", "", f"{REPLACEMENT * 2}o", ""]


@given(st.lists(st.integers(0, BYTE.get_vocab_size() - 1), max_size=60))
def test_byte_level_deltas_are_the_decoded_output_whatever_the_tokens(token_ids: list[int]) -> None:
    assert "".join(stream(BYTE, token_ids)) == BYTE.decode(token_ids)


@given(st.lists(st.sampled_from(byte_ids(BYTE, b"\xf0\x9f\x9f\x80\x80\xe2\xffa")), max_size=80))
@example(byte_ids(BYTE, b"\x80" * 40 + b"\xf0\x9f\x80\x80"))
def test_byte_level_deltas_are_the_decoded_output_even_if_mostly_invalid(
    token_ids: list[int],
) -> None:
    assert "".join(stream(BYTE, token_ids)) == BYTE.decode(token_ids)


@given(st.lists(st.integers(0, FALLBACK.get_vocab_size() - 1), max_size=60))
def test_byte_fallback_deltas_are_the_decoded_output_where_that_is_valid(
    token_ids: list[int],
) -> None:
    whole = FALLBACK.decode(token_ids)
    streamed = "".join(stream(FALLBACK, token_ids))

    assert streamed == whole or REPLACEMENT in whole


@given(st.text(max_size=30), st.text(max_size=8))
def test_any_text_comes_back_behind_any_prompt(text: str, prompt: str) -> None:
    for tokenizer in (BYTE, FALLBACK):
        prompt_ids = (0, *ids_of(tokenizer, f"b{prompt}b"))
        assert "".join(stream(tokenizer, ids_of(tokenizer, text), prompt_ids)) == text


@pytest.mark.parametrize("tokenizer", [BYTE, FALLBACK], ids=["byte-level", "byte-fallback"])
def test_a_character_that_the_prompt_leaves_open_belongs_to_the_output(
    tokenizer: Tokenizer,
) -> None:
    ids = ids_of(tokenizer, "ab\U0001f600b")

    assert "".join(stream(tokenizer, ids[4:], tuple(ids[:4]))) == "\U0001f600b"


def test_a_character_that_the_context_cuts_spoils_neither_prompt_nor_output() -> None:
    prompt = ids_of(FALLBACK, "\U0001f600\U0001f600\U0001f600")

    deltas = stream(FALLBACK, ids_of(FALLBACK, "\U0001f600b"), tuple(prompt))

    assert deltas == ["", "", "", "\U0001f600", "b", ""]


def test_a_prompt_of_invalid_bytes_is_not_repeated_in_the_output() -> None:
    prompt = tuple(byte_ids(BYTE, b"\x80" * 8))

    assert "".join(stream(BYTE, ids_of(BYTE, "hello"), prompt)) == "hello"


@pytest.mark.parametrize("token", [byte_ids(BYTE, b"\x80")[0], 0], ids=["invalid", "special"])
def test_endless_tokens_without_text_are_not_decoded_again_and_again(token: int) -> None:
    longest = 0

    class Counting:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return str(BYTE.decode(ids, skip_special_tokens=skip_special_tokens))

    deltas = stream(Counting(), [token] * 400)  # type: ignore[arg-type]

    assert "".join(deltas) == BYTE.decode([token] * 400)
    assert longest <= 2 * MAX_OPEN_TOKENS + 2


def test_special_tokens_are_text_only_where_that_is_asked_for() -> None:
    token_ids = [0, *ids_of(BYTE, "he"), 0]
    shown = Detokenizer(BYTE, [], skip_special_tokens=False)
    for token in token_ids:
        shown.add(token)

    assert "".join(stream(BYTE, token_ids)) == "he"
    assert shown.flush() == "<s>he<s>"


def run_to_stop(
    words: str, stop: tuple[str, ...], include_stop: bool = False
) -> tuple[list[str], str | None]:
    """(deltas, the stop string that ended it) of a text of words."""
    detokenizer = Detokenizer(WORD, [0], stop=stop, include_stop=include_stop)
    deltas = []
    for token in ids_of(WORD, words):
        detokenizer.add(token)
        found = detokenizer.find_stop()
        if found is not None:
            return [*deltas, detokenizer.flush()], found
        deltas.append(detokenizer.take())
    return [*deltas, detokenizer.flush()], None


def test_a_stop_string_across_tokens_is_cut_with_nothing_of_it_given_out() -> None:
    deltas, stop = run_to_stop("the cat eat ice", stop=("t ea",))

    assert (deltas, stop) == ([" the", " ca", ""], "t ea")


def test_a_stop_string_is_kept_where_that_is_asked_for() -> None:
    deltas, _ = run_to_stop("the cat eat ice", stop=("t ea",), include_stop=True)

    assert "".join(deltas) == " the cat ea"


def test_a_held_back_beginning_is_given_out_once_it_leads_nowhere() -> None:
    deltas, stop = run_to_stop("the cat ice the", stop=("t ea",))

    assert (deltas, stop) == ([" the", " ca", "t ice", " the", ""], None)


def test_a_held_back_beginning_is_given_out_at_the_end() -> None:
    deltas, stop = run_to_stop("the cat", stop=("t ea",))

    assert (deltas, stop) == ([" the", " ca", "t"], None)


def test_the_first_of_overlapping_stop_strings_in_the_text_ends_it() -> None:
    deltas, stop = run_to_stop("the cat", stop=("at", "cat", "he c"))

    assert ("".join(deltas), stop) == (" t", "he c")


def test_a_stop_string_that_overlaps_itself_is_found() -> None:
    deltas, stop = run_to_stop("bee bee bee cat", stop=("bee bee cat",))

    assert ("".join(deltas), stop) == (" bee ", "bee bee cat")


@given(st.lists(st.integers(0, 23), min_size=1, max_size=12), st.integers(0, 40), st.integers(1, 9))
def test_streamed_text_ends_exactly_before_the_first_stop_string(
    token_ids: list[int], start: int, length: int
) -> None:
    whole = WORD.decode([0, *token_ids])[len(WORD.decode([0])) :]
    stop = whole[start % len(whole) :][:length]

    deltas, found = run_to_stop(whole, stop=(stop,))

    assert ("".join(deltas), found) == (whole[: whole.index(stop)], stop)


def test_a_fork_goes_its_own_way() -> None:
    parent = Detokenizer(BYTE, [], stop=())
    first, *rest = ids_of(BYTE, "\u65e5")
    parent.add(first)
    child = parent.fork()

    for token in rest:
        parent.add(token)
    child.add(ids_of(BYTE, "b")[0])

    assert (parent.flush(), child.flush()) == ("\u65e5", f"{REPLACEMENT}b")


def test_a_fork_has_all_that_its_original_has() -> None:
    original = Detokenizer(word_tokenizer(), [5, 6])

    assert vars(original.fork()) == vars(original)
