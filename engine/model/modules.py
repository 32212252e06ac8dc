"""Finding the modules of a model together with the place where each hangs."""

from typing import NamedTuple

from torch import nn


class Place(NamedTuple):
    """An attribute of a module that holds another one."""

    parent: nn.Module
    attribute: str

    def put(self, module: nn.Module) -> None:
        setattr(self.parent, self.attribute, module)


def places(model: nn.Module) -> list[tuple[Place, nn.Module]]:
    """Every module below the model, with where it hangs."""
    return [
        (Place(parent, attribute), module)
        for parent in model.modules()
        for attribute, module in parent.named_children()
    ]
