"""What customers write, and the JSON that the `json` adapter makes of it.

The keys are always name, city, item and order, in this order; what the text does not say is null.
"""

import json
import tomllib
from pathlib import Path
from random import Random

from examples import shop
from examples.example import Example

KEYS = ("name", "city", "item", "order")
SEEDS = {"train": 11, "heldout": 12}

TEMPLATES: dict[str, list[str]] = tomllib.loads(
    (Path(__file__).parent / "templates.toml").read_text(encoding="utf-8")
)


def generate(split: str, count: int) -> list[Example]:
    """`count` different examples of the split "train" or "heldout", always the same ones."""
    random = Random(SEEDS[split])
    found: dict[str, Example] = {}
    for number in range(count * 20):
        template = TEMPLATES[split][number % len(TEMPLATES[split])]
        example = _example(template, split, random)
        found.setdefault(example.question, example)
        if len(found) == count:
            break
    return list(found.values())


def _example(template: str, split: str, random: Random) -> Example:
    values = {
        "name": shop.person(split, random),
        "city": shop.CITIES.pick(split, random),
        "item": shop.ITEMS.pick(split, random),
        "order": shop.order_number(random),
    }
    told = {key: value if f"{{{key}}}" in template else None for key, value in values.items()}
    return Example(template.format(**values), json.dumps(told))
