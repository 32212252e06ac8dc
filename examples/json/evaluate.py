"""Scores the `json` adapter on held-out texts: python -m examples.json.evaluate"""

from examples.evaluation import evaluate
from examples.json.data import generate
from examples.json.scoring import score

HELDOUT = 60


if __name__ == "__main__":
    evaluate("json", generate("heldout", HELDOUT), score)
