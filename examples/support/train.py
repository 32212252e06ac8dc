"""Trains the `support` adapter: python -m examples.support.train"""

from examples.support.data import generate
from examples.training import Recipe, train

RECIPE = Recipe(
    name="support",
    rank=4,
    target_modules=(
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ),
    learning_rate=2e-3,
    steps=120,
    batch_size=4,
)
EXAMPLES = 480

if __name__ == "__main__":
    print(train(RECIPE, generate("train", EXAMPLES)))
