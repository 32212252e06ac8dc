"""DrawSettings: how each token of a step is drawn."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class DrawSettings:
    """One entry for each of D draws, in tensors on the device of the logits."""

    temperature: Tensor  # [D] float32, above 0
    top_k: Tensor  # [D] int64; 0: all tokens
    top_p: Tensor  # [D] float32, in (0, 1]
    min_p: Tensor  # [D] float32, in [0, 1]
    has_cuts: bool = True  # False: every top_k is 0 and every top_p is 1
