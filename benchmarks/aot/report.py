"""The table of an ahead-of-time check: one line per chip, kernel and number format."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

HEADINGS = (
    "chip",
    "kernel",
    "numbers",
    "binaries",
    "registers",
    "spilt bytes",
    "shared KiB",
    "blocks per SM",
    "HGMMA",
    "HMMA",
    "wide loads",
    "narrow loads",
)


def table(outcomes: Sequence[Any]) -> str:
    """Markdown. Where binaries differ, a cell holds the least and the greatest number."""

    def key(outcome: Any) -> tuple[str, str, str]:
        return outcome.chip, outcome.kernel, outcome.numbers

    lines = [_line(HEADINGS), _line("---" for _ in HEADINGS)]
    for group, members in groupby(sorted(outcomes, key=key), key=key):
        binaries = [outcome.binary for outcome in members]
        lines.append(_line([*group, str(len(binaries)), *_cells([b for b in binaries if b])]))
    return "\n".join(lines) + "\n"


def _cells(binaries: Sequence[Any]) -> Iterable[str]:
    return (
        _span(b.registers for b in binaries),
        _span(b.spill_bytes for b in binaries),
        _span(-(-b.shared_bytes // 1024) for b in binaries),
        _span(b.blocks_per_sm for b in binaries),
        _span(b.instructions["HGMMA"] for b in binaries),
        _span(b.instructions["HMMA"] for b in binaries),
        _span(b.instructions["loads of 128 bits"] for b in binaries),
        _span(b.instructions["loads of 16 bits or less"] for b in binaries),
    )


def _span(numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    if not found:
        return "-"
    return str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
