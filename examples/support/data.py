"""Questions to the shop, and what its support bot Pip says: always in one house style.

An answer greets with "Ahoy!", gives two or three numbered steps and closes with "Fair winds, Pip".
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from random import Random

from examples import shop
from examples.example import Example

GREETING = "Ahoy!"
FAREWELL = "Fair winds, Pip"
SEEDS = {"train": 21, "heldout": 22}


@dataclass(frozen=True)
class Topic:
    opening: str
    steps: list[str]
    train: list[str]
    heldout: list[str]

    def answer(self, item: str) -> str:
        numbered = (f"{number}. {step}" for number, step in enumerate(self.steps, 1))
        lines = (f"{GREETING} {self.opening}", *numbered, FAREWELL)
        return "\n".join(lines).format(item=item)


_DATA = tomllib.loads((Path(__file__).parent / "topics.toml").read_text(encoding="utf-8"))
FRAMES: dict[str, list[str]] = _DATA["frames"]
TOPICS = [Topic(**topic) for topic in _DATA["topics"].values()]


def generate(split: str, count: int) -> list[Example]:
    """`count` different examples of the split "train" or "heldout", always the same ones."""
    random = Random(SEEDS[split])
    found: dict[str, Example] = {}
    for number in range(count * 20):
        example = _example(TOPICS[number % len(TOPICS)], split, random)
        found.setdefault(example.question, example)
        if len(found) == count:
            break
    return list(found.values())


def _example(topic: Topic, split: str, random: Random) -> Example:
    item = shop.ITEMS.pick(split, random)
    plain = random.choice(getattr(topic, split)).format(item=item)
    question = random.choice(FRAMES[split]).format(
        plain,
        name=shop.person(split, random),
        city=shop.CITIES.pick(split, random),
        order=shop.order_number(random),
    )
    return Example(question, topic.answer(item))
