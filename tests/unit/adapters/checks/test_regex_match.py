"""Expressions from an adapter's config match by PEFT's rules."""

import re

import pytest

from loraplex.adapters.checks.regex_match import RegexError, match_all

NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.10.mlp.up_proj",
    "lm_head",
]


@pytest.mark.parametrize("pattern", [r".*\.(q_proj|up_proj)", "lm_head", "lm_hea", "(?i).*Q_PROJ"])
def test_full_is_fullmatch(pattern: str) -> None:
    (row,) = match_all("full", [pattern], NAMES)
    expected = [re.fullmatch(pattern, name) is not None for name in NAMES]
    assert [hit is not None for hit in row] == expected


def test_layers_are_found_by_number() -> None:
    assert match_all("any_layer", [""], NAMES) == [["0", "1", "10", None]]
    assert match_all("layer", ["lay.*", "blocks"], NAMES) == [["0", "1", "10", None], [None] * 4]


@pytest.mark.parametrize("pattern", ["(", "a**", "(?P<idx>x)(?P<idx>y)", "(" * 5000])
def test_an_expression_that_is_not_valid_is_named(pattern: str) -> None:
    with pytest.raises(RegexError, match=re.escape(repr(pattern[:200]))):
        match_all("full", [pattern], NAMES)


def test_many_plain_names_are_matched_too() -> None:
    patterns = [f"layers.{i}.q_proj" for i in range(300)]
    names = [f"model.layers.{i}.q_proj" for i in range(300)]
    rows = match_all("suffix", patterns, names)
    assert [row.index("") for row in rows] == list(range(300))
