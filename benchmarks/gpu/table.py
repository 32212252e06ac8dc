"""The records as a table for people."""

from collections.abc import Iterator, Sequence
from typing import Any

HEADS = ("group", "case", "right", "error", "us", "copy", "matmul", "goal us", "met", "beside it")
_ANSWERS = {True: "yes", False: "NO", None: ""}
_SHOWN = {"seconds", "tokens_per_second", "why"}


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown: one line for each timed or wrong case, and one for all others of a group."""
    shown = [r for r in records if _SHOWN & r.keys() or r.get("ok") is False]
    lines = [_line(HEADS), _line(["---"] * len(HEADS)), *map(_row, shown)]
    for group in dict.fromkeys(r["group"] for r in records):
        others = [r for r in records if r["group"] == group and r not in shown and "ok" in r]
        if others:
            worst = max(float(r.get("error", 0)) for r in others)
            text = f"{len(others)} more, all right; largest error {worst:.1e}"
            lines.append(_line([group, text, *[""] * (len(HEADS) - 2)]))
    return "\n".join(lines)


def _row(record: dict[str, Any]) -> str:
    return _line(
        [
            record["group"],
            record["case"] + (f": {record['why']}" if "why" in record else ""),
            _ANSWERS[record.get("ok")],
            f"{record['error']:.1e}" if "error" in record else "",
            _us(record.get("seconds")),
            _percent(record.get("copy_share")),
            _percent(record.get("matmul_share")),
            _us(record.get("goal")),
            _ANSWERS[record.get("met")].lower(),
            "; ".join(_notes(record)),
        ]
    )


def _notes(record: dict[str, Any]) -> Iterator[str]:
    if record.get("is_hot"):
        yield "hot: fits into the cache, so that its goal says nothing"
    if "over_base" in record:
        floor = record["floor_over_base"]
        yield f"{record['over_base']:.2f} of the base step, {floor:.2f} by bytes alone"
    if "tokens_per_second" in record:
        yield f"{record['tokens_per_second']:.0f} tokens/s"
    for name, seconds in record.get("parts", {}).items():
        yield f"{name} {_us(seconds)} us"
    for name, seconds in record.get("peers", {}).items():
        yield f"{name} {_us(seconds)} us" if isinstance(seconds, float) else f"{name}: {seconds}"


def _us(seconds: object) -> str:
    return f"{seconds * 1e6:.1f}" if isinstance(seconds, float) else str(seconds or "")


def _percent(share: object) -> str:
    return f"{share:.0%}" if isinstance(share, float) else ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
