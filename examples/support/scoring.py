"""How right, and how much in house style, an answer of the `support` adapter is."""

from examples.example import Example
from examples.support.data import FAREWELL, GREETING


def score(example: Example, answer: str) -> dict[str, float]:
    """`style`: the part of the house style that is kept: greeting, numbered steps, farewell.
    `right`: the very answer for this matter and this item."""
    lines = answer.strip().split("\n")
    steps = lines[1:-1]
    kept = (
        lines[0].startswith(f"{GREETING} "),
        len(steps) in (2, 3) and all(step.startswith(f"{n}. ") for n, step in enumerate(steps, 1)),
        lines[-1] == FAREWELL,
    )
    return {"style": sum(kept) / len(kept), "right": float(answer.strip() == example.answer)}
