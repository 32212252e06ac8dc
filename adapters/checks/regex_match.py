"""Matches regular expressions from untrusted files against module names.

A hostile expression can take exponential time or all memory: untrusted ones are matched only in the
process that checks adapters, which limits both.
"""

import re
from collections.abc import Callable, Sequence

# PEFT's rules: for a target_modules text, for a key of rank_pattern, for a layers_pattern, and for
# the layer number where there is no layers_pattern.
_RULES: dict[str, Callable[[str], Callable[[str], re.Match[str] | None]]] = {
    "full": lambda pattern: re.compile(pattern).fullmatch,
    "suffix": lambda pattern: re.compile(rf"(.*\.)?({pattern})$").match,
    "layer": lambda pattern: re.compile(rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.").match,
    "any_layer": lambda _: re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.").match,
}


class RegexError(ValueError):
    """Raised for an expression that is not valid."""


def match_all(rule: str, patterns: Sequence[str], names: Sequence[str]) -> list[list[str | None]]:
    """Matches each pattern against each name by one of PEFT's rules.

    Args:
        rule: full, suffix, layer or any_layer.

    Returns:
        One row per pattern with an entry per name: None where it does not match, else the layer
        number that a layer rule finds, "" for the other rules.

    Raises:
        RegexError: a pattern is not valid; it is named.
    """
    rows = []
    for pattern in patterns:
        try:
            match = _RULES[rule](pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise RegexError(f"{pattern[:200]!r} is not a valid regular expression") from error
        rows.append([_layer(match(name)) for name in names])
    return rows


def _layer(match: re.Match[str] | None) -> str | None:
    return None if match is None else match.groupdict().get("idx") or ""
