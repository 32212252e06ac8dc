"""Trains the `json` adapter: python -m examples.json.train"""

from examples.json.data import generate
from examples.training import Recipe, train

RECIPE = Recipe(
    name="json",
    rank=8,
    target_modules=("q_proj", "k_proj", "v_proj", "o_proj"),
    learning_rate=1e-3,
    steps=220,
    batch_size=4,
)
EXAMPLES = 880

if __name__ == "__main__":
    print(train(RECIPE, generate("train", EXAMPLES)))
