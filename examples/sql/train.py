"""Trains the `sql` adapter, an activated LoRA: python -m examples.sql.train

It acts from the last "### Assistant:" line on: the tokens of the question are the base model's.
"""

from examples.sql.data import generate
from examples.training import GENERATION_PROMPT, Recipe, train

RECIPE = Recipe(
    name="sql",
    rank=6,
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
    steps=300,
    batch_size=4,
    invocation=GENERATION_PROMPT,
)
EXAMPLES = 1_200

if __name__ == "__main__":
    print(train(RECIPE, generate("train", EXAMPLES)))
