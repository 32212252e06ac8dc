"""Packs the weights of a model's linears for the kernels, in place of the originals."""

from typing import cast

import torch
from torch import Tensor, nn

from loraplex.engine.model.modules import Place, places, reproduces
from loraplex.kernels.linear.format import KeptWeight, LinearFormat
from loraplex.kernels.native.huge_pages import HugePages, give_back_freed_memory

_SAMPLE = 8  # rows by which an embedding is found to compute what a packed one will


class PackedLinear(nn.Module):
    """Takes the place of an `nn.Linear`."""

    def __init__(self, format: LinearFormat, packed: KeptWeight, bias: Tensor | None) -> None:
        super().__init__()
        self._format = format
        self._packed = packed
        self._bias = None if bias is None else bias.float()

    @property
    def weight(self) -> Tensor:
        """Returns the weight [out, in], unpacked anew at each use."""
        return self._packed.unpack()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return self._format.linear(x, self._packed, self._bias)


class PackedEmbedding(nn.Module):
    """Takes the place of the embedding that shares its weight with lm_head."""

    def __init__(self, packed: KeptWeight, scale: Tensor | float | None) -> None:
        super().__init__()
        self._packed = packed
        self._scale = scale

    @property
    def weight(self) -> Tensor:
        """Returns the weight [vocabulary, hidden], unpacked anew at each use."""
        return self._packed.unpack()

    def forward(self, token_ids: Tensor) -> Tensor:
        """[...] int64 -> [..., hidden]"""
        rows = self._packed.rows(token_ids)
        return rows if self._scale is None else rows * self._scale


def pack_linears(model: nn.Module, format: LinearFormat) -> None:
    """Replaces every `nn.Linear` of a dtype of the format, and the embeddings tied to one, so that
    no weight is stored twice. A tied embedding whose class computes something unknown stays as it
    is."""
    packed: dict[int, KeptWeight] = {}  # by the id of the weight
    linears = [
        (place, old)
        for place, old in places(model)
        if type(old) is nn.Linear and old.weight.dtype in format.dtypes
    ]
    embeddings = [(place, old) for place, old in places(model) if isinstance(old, nn.Embedding)]
    memory = HugePages(sum(format.num_bytes(old.weight) for _, old in linears))
    while linears:  # one by one, so that each original is freed before the next is packed
        place, old = linears.pop()
        key = id(old.weight)
        if key not in packed:
            packed[key] = format.pack(old.weight.detach(), memory)
        bias = None if old.bias is None else old.bias.detach()
        place.put(PackedLinear(format, packed[key], bias))
        for where, embedding in embeddings:
            if embedding.weight is old.weight:
                _replace_embedding(where, embedding, packed[key])
    leave_checkpoint(model)


def leave_checkpoint(model: nn.Module) -> None:
    """Copies the remaining views of the mapped checkpoint, so that its files may change or end.

    A mapped file that is cut short would end the process, and a single view keeps all of it in
    memory.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    give_back_freed_memory()


def _replace_embedding(place: Place, module: nn.Embedding, packed: KeptWeight) -> None:
    scale = cast(Tensor | float | None, getattr(module, "embed_scale", None))
    if isinstance(scale, Tensor):
        scale = scale.to(module.weight.dtype)
    sample = torch.arange(min(_SAMPLE, module.num_embeddings))

    def ours(token_ids: Tensor) -> Tensor:
        rows = module.weight[token_ids]
        return rows if scale is None else rows * scale

    if reproduces(ours, module, sample):
        place.put(PackedEmbedding(packed, scale))
