"""Scores the `support` adapter on held-out questions: python -m examples.support.evaluate"""

from examples.evaluation import evaluate
from examples.support.data import generate
from examples.support.scoring import score

HELDOUT = 66


if __name__ == "__main__":
    evaluate("support", generate("heldout", HELDOUT), score)
