"""The tables that questions are asked about, with rows to run the answers on."""

import sqlite3
import tomllib
from dataclasses import dataclass
from pathlib import Path
from random import Random

from examples import shop

Value = str | int


@dataclass(frozen=True)
class Table:
    name: str
    texts: dict[str, list[str]]  # column -> the values that its rows take
    numbers: dict[str, list[int]]  # column -> lowest and highest value
    key: str = ""  # a first text column, different in each row

    @property
    def columns(self) -> tuple[str, ...]:
        return (*((self.key,) if self.key else ()), *self.texts, *self.numbers)

    @property
    def schema(self) -> str:
        """As questions show it: "Table books(title, genre, year)"."""
        return f"Table {self.name}({', '.join(self.columns)})"

    def rows(self) -> list[dict[str, Value]]:
        """40 rows, always the same ones."""
        random = Random(self.name)
        return [self._row(number, random) for number in range(40)]

    def _row(self, number: int, random: Random) -> dict[str, Value]:
        row: dict[str, Value] = {self.key: f"{self.key} {number}"} if self.key else {}
        row |= {column: random.choice(values) for column, values in self.texts.items()}
        return row | {column: random.randint(*span) for column, span in self.numbers.items()}


def connect(tables: list[Table]) -> sqlite3.Connection:
    """A database in memory that holds the tables and lets a query do nothing but read them."""
    connection = sqlite3.connect(":memory:")
    for table in tables:
        connection.execute(f"CREATE TABLE {table.name} ({', '.join(table.columns)})")
        marks = ", ".join("?" for _ in table.columns)
        rows = [tuple(row[column] for column in table.columns) for row in table.rows()]
        connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", rows)
    connection.commit()
    allowed = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)
    connection.set_authorizer(
        lambda action, *_: sqlite3.SQLITE_OK if action in allowed else sqlite3.SQLITE_DENY
    )
    return connection


# The shop's own table, for questions that name no table.
ORDERS = Table(
    "orders",
    {
        "customer": [f"{name} Lind" for name in shop.FIRST_NAMES.train[:20]],
        "city": list(shop.CITIES.train[:8]),
        "item": list(shop.ITEMS.train[:8]),
        "status": ["new", "packed", "shipped", "delivered", "returned"],
    },
    {"id": [1_000, 9_999], "price": [5, 300]},
)

_DATA = tomllib.loads((Path(__file__).parent / "tables.toml").read_text(encoding="utf-8"))
TABLES = {split: [Table(**table) for table in tables] for split, tables in _DATA.items()}
TABLES["train"].insert(0, ORDERS)
