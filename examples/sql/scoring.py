"""How right an answer of the `sql` adapter is: both queries are run."""

import sqlite3
from functools import cache

from examples.example import Example
from examples.sql.tables import TABLES, connect

MAX_STEPS = 1_000_000  # of SQLite's virtual machine; a wild query ends here

Rows = list[tuple[object, ...]]


def score(example: Example, answer: str) -> dict[str, float]:
    """`runs`: SQLite takes it. `right`: its rows are those of the wanted query, in the same order
    where that one orders them. `exact`: it is the wanted query, letter by letter."""
    found = _run(answer)
    wanted = _run(example.answer)
    if "ORDER BY" not in example.answer:
        found, wanted = _sorted(found), _sorted(wanted)
    return {
        "runs": float(found is not None),
        "right": float(found == wanted),
        "exact": float(answer.strip() == example.answer),
    }


def _run(query: str) -> Rows | None:
    try:
        return _database().execute(query).fetchall() if query.strip() else None
    except (sqlite3.Error, sqlite3.Warning):
        return None


@cache
def _database() -> sqlite3.Connection:
    connection = connect([*TABLES["train"], *TABLES["heldout"]])
    connection.set_progress_handler(lambda: 1, MAX_STEPS)
    return connection


def _sorted(rows: Rows | None) -> Rows | None:
    return rows and sorted(rows, key=repr)
