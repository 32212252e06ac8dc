"""The questions and answers that the example adapters learn from and are measured by."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[3]
COUNT = 300


@pytest.fixture(params=["json", "sql", "support"])
def task(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """One example's data generator and scorer."""
    monkeypatch.syspath_prepend(ROOT)
    data = import_module(f"examples.{request.param}.data")
    scoring = import_module(f"examples.{request.param}.scoring")
    return SimpleNamespace(generate=data.generate, score=scoring.score)


def questions(generate: Callable, split: str) -> list[str]:
    return [example.question for example in generate(split, COUNT)]


def test_a_split_is_always_the_same(task: SimpleNamespace) -> None:
    assert task.generate("heldout", COUNT) == task.generate("heldout", COUNT)


def test_no_held_out_question_is_in_the_training_set(task: SimpleNamespace) -> None:
    assert not set(questions(task.generate, "train")) & set(questions(task.generate, "heldout"))


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_split_repeats_no_question(task: SimpleNamespace, split: str) -> None:
    found = questions(task.generate, split)

    assert len(set(found)) == len(found) == COUNT


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_wanted_answer_gets_full_marks(task: SimpleNamespace, split: str) -> None:
    for example in task.generate(split, COUNT):
        assert set(task.score(example, example.answer).values()) == {1.0}, example


@pytest.mark.parametrize("answer", ["", "I have a question.", "{}", "SELECT", "DROP TABLE orders;"])
def test_another_answer_gets_no_full_marks(task: SimpleNamespace, answer: str) -> None:
    for example in task.generate("heldout", 20):
        assert max(task.score(example, answer).values()) < 1.0, (example, answer)
