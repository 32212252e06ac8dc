"""How right an answer of the `json` adapter is."""

import json

from examples.example import Example
from examples.json.data import KEYS


def score(example: Example, answer: str) -> dict[str, float]:
    """`valid`: JSON with just the four keys. `fields`: the part of them with the right value.
    `exact`: all of them right."""
    found = _parse(answer)
    wanted = json.loads(example.answer)
    right = sum(key in found and found[key] == wanted[key] for key in KEYS)
    return {
        "valid": float(tuple(found) == KEYS),
        "fields": right / len(KEYS),
        "exact": float(found == wanted),
    }


def _parse(answer: str) -> dict[str, object]:
    try:
        found = json.loads(answer)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
