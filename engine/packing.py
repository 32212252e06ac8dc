"""Packs the weights of a model's linears for the native kernels, in place of the originals."""

from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from loraplex.kernels.linear.cpu import PackedWeight, linear

M = TypeVar("M", bound=nn.Module)

_SAMPLE = 8  # rows by which a packed embedding is compared with the one it replaces


class PackedLinear(nn.Module):
    """Stands where an `nn.Linear` stood."""

    def __init__(self, packed: PackedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self._packed = packed
        self._bias = None if bias is None else bias.float()

    @property
    def weight(self) -> Tensor:
        """[out, in], unpacked anew at each use."""
        return self._packed.unpack()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], bfloat16"""
        return linear(x, self._packed, self._bias)


class PackedEmbedding(nn.Module):
    """Stands where the embedding stood that shares its weight with lm_head."""

    def __init__(self, packed: PackedWeight, embed_scale: Tensor | None) -> None:
        super().__init__()
        self._packed = packed
        self._scale = None if embed_scale is None else embed_scale.to(torch.bfloat16)

    @property
    def weight(self) -> Tensor:
        """[vocabulary, hidden], unpacked anew at each use."""
        return self._packed.unpack()

    def forward(self, token_ids: Tensor) -> Tensor:
        """[...] int64 -> [..., hidden]"""
        rows = self._packed.rows(token_ids)
        return rows if self._scale is None else rows * self._scale


def pack_linears(model: nn.Module) -> None:
    """Replaces every bfloat16 `nn.Linear`, and embeddings tied to one, so that no weight is kept
    twice. A tied embedding whose class computes something unknown stays as it is."""
    packed: dict[int, PackedWeight] = {}  # by the id of the weight
    embeddings = _places(model, nn.Embedding)
    places = _places(model, nn.Linear)
    while places:  # one by one, so that each original is freed before the next is packed
        parent, attribute, old = places.pop()
        if type(old) is nn.Linear and old.weight.dtype == torch.bfloat16:
            key = id(old.weight)
            if key not in packed:
                packed[key] = PackedWeight.pack(old.weight.detach())
            bias = None if old.bias is None else old.bias.detach()
            tied = [place for place in embeddings if place[2].weight is old.weight]
            setattr(parent, attribute, PackedLinear(packed[key], bias))
            for place in tied:
                _replace_embedding(*place, packed[key])
    for parameter in model.parameters():
        # A view of the mapped checkpoint: the last one would keep all of it in memory.
        parameter.data = parameter.data.clone()


def _replace_embedding(
    parent: nn.Module, attribute: str, module: nn.Embedding, packed: PackedWeight
) -> None:
    replacement = PackedEmbedding(packed, cast(Tensor | None, getattr(module, "embed_scale", None)))
    sample = torch.arange(min(_SAMPLE, module.num_embeddings))
    if torch.equal(replacement(sample), module(sample)):
        setattr(parent, attribute, replacement)


def _places(model: nn.Module, kind: type[M]) -> list[tuple[nn.Module, str, M]]:
    """Every module of a kind: its parent, its attribute there, itself."""
    return [
        (parent, attribute, module)
        for parent in model.modules()
        for attribute, module in parent.named_children()
        if isinstance(module, kind)
    ]
