"""Finds a model's modules and their places, and compares replacements with them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Place(NamedTuple):
    """An attribute of a module that holds another module."""

    parent: nn.Module
    attribute: str

    def put(self, module: nn.Module) -> None:
        setattr(self.parent, self.attribute, module)


def places(model: nn.Module) -> list[tuple[Place, nn.Module]]:
    """Returns every module below the model, with its place."""
    return [
        (Place(parent, attribute), module)
        for parent in model.modules()
        for attribute, module in parent.named_children()
    ]


def reproduces(ours: Callable[..., Any], theirs: Callable[..., Any], *inputs: Tensor) -> bool:
    """Returns whether both give the same tensor, or the same tensors, to the bit.

    A module that fails on these inputs, or takes or returns something else, is not the same.
    """
    try:
        got, want = ours(*inputs), theirs(*inputs)
    except Exception:
        return False
    pairs = list(zip(got, want, strict=False)) if isinstance(got, tuple) else [(got, want)]
    return type(got) is type(want) and all(
        isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs
    )
