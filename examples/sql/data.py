"""Questions about a table, and the SQL that answers them.

A question shows its table in the first line; one that shows none is about the shop's `orders`.
Held-out questions are about tables that training never saw, in wordings that it never saw.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from random import Random

from examples.example import Example
from examples.sql.tables import ORDERS, TABLES, Table

SEEDS = {"train": 31, "heldout": 32}
UNSHOWN = 4  # one question in so many shows no table


@dataclass(frozen=True)
class Pattern:
    """One kind of query, and how it is asked for in each split."""

    sql: str
    train: list[str]
    heldout: list[str]


_DATA = tomllib.loads((Path(__file__).parent / "patterns.toml").read_text(encoding="utf-8"))
PATTERNS = [Pattern(**pattern) for pattern in _DATA["pattern"]]
SHOP_PATTERNS = [Pattern(**pattern) for pattern in _DATA["shop_pattern"]]


def generate(split: str, count: int) -> list[Example]:
    """`count` different examples of the split "train" or "heldout", always the same ones."""
    random = Random(SEEDS[split])
    found: dict[str, Example] = {}
    for number in range(count * 20):
        make = _about_the_shop if number % UNSHOWN == 0 else _about_a_table
        example = make(split, random)
        found.setdefault(example.question, example)
        if len(found) == count:
            break
    return list(found.values())


def _about_a_table(split: str, random: Random) -> Example:
    table, pattern = random.choice(TABLES[split]), random.choice(PATTERNS)
    values = _values(table, random)
    question = random.choice(getattr(pattern, split)).format(**values)
    return Example(f"{table.schema}\n{question}", pattern.sql.format(**values))


def _about_the_shop(split: str, random: Random) -> Example:
    pattern = random.choice(SHOP_PATTERNS)
    values = random.choice(ORDERS.rows())
    question = random.choice(getattr(pattern, split)).format(**values)
    return Example(question, pattern.sql.format(**values))


def _values(table: Table, random: Random) -> dict[str, str | int]:
    """All conditions are taken from one row, so that no answer is empty."""
    row = random.choice(table.rows())
    a, b = random.sample(list(table.texts), 2)
    n = random.choice(list(table.numbers))
    c = random.choice([column for column in table.columns if column not in (a, n)])
    gap = random.randint(1, 9)
    return {
        "t": table.name,
        "ts": table.name,
        "a": a,
        "b": b,
        "c": c,
        "n": n,
        "x": row[a],
        "y": row[b],
        "above": max(int(row[n]) - gap, 0),
        "below": int(row[n]) + gap,
        "k": random.randint(2, 9),
    }
