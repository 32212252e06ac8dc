"""Matches regular expressions from untrusted files against module names.

A hostile expression can take exponential time or all memory, and Python cannot stop one in its own
process. So all but short lists of plain names are matched by this file run as a child process,
which has a time and a memory limit. It imports the standard library only.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence

_SECONDS = 3
_MEMORY = 256 << 20
_PLAIN = re.compile(r"\^?(?:\w|\\?\.|-)*")
_FEW = 50_000

# PEFT's rules: for a target_modules text, for a key of rank_pattern, for a layers_pattern, and for
# the layer number where there is no layers_pattern.
_RULES: dict[str, Callable[[str], Callable[[str], re.Match[str] | None]]] = {
    "full": lambda pattern: re.compile(pattern).fullmatch,
    "suffix": lambda pattern: re.compile(rf"(.*\.)?({pattern})$").match,
    "layer": lambda pattern: re.compile(rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.").match,
    "any_layer": lambda _: re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.").match,
}


class RegexError(ValueError):
    """An expression is not valid, or too costly to match."""


def match_all(rule: str, patterns: Sequence[str], names: Sequence[str]) -> list[list[str | None]]:
    """Matches each pattern against each name by one of PEFT's rules.

    Args:
        rule: full, suffix, layer or any_layer.

    Returns:
        One row per pattern with an entry per name: None where it does not match, else the layer
        number that a layer rule finds, "" for the other rules.

    Raises:
        RegexError: a pattern is not valid (it is named), or the limits were exceeded.
    """
    few = len(patterns) * len(names) <= _FEW
    if few and all(_PLAIN.fullmatch(pattern) for pattern in patterns):
        return _match(rule, patterns, names)
    return _match_in_child(rule, patterns, names)


def _match(rule: str, patterns: Sequence[str], names: Sequence[str]) -> list[list[str | None]]:
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


def _match_in_child(
    rule: str, patterns: Sequence[str], names: Sequence[str]
) -> list[list[str | None]]:
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-W", "ignore", __file__],
            input=json.dumps([rule, patterns, names]),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        answer = json.loads(child.stdout)
    except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        raise RegexError("a regular expression takes too long or too much memory") from error
    if isinstance(answer, str):
        raise RegexError(answer)
    return list(answer)


def _limit_memory() -> None:
    try:
        import resource  # noqa: PLC0415 - not on every system
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))


def main() -> None:
    rule, patterns, names = json.load(sys.stdin)
    _limit_memory()
    try:
        answer: object = _match(rule, patterns, names)
    except RegexError as error:
        answer = str(error)
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
