"""Scores the `sql` adapter by running its answers: python -m examples.sql.evaluate"""

from examples.evaluation import evaluate
from examples.sql.data import generate
from examples.sql.scoring import score

HELDOUT = 100


if __name__ == "__main__":
    evaluate("sql", generate("heldout", HELDOUT), score)
