"""inject_lora: puts LoRA layers into a model, and LoRASites fills their slots."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import cast

import torch
from torch import nn

from loraplex.adapters.checks.catalogue import TargetCatalogue, TargetKind
from loraplex.adapters.layers import (
    FusedLinear,
    FusedMember,
    LoRAContext,
    LoRAEmbedding,
    LoRALayer,
    LoRALinear,
)
from loraplex.adapters.targets import catalogue_of
from loraplex.adapters.weights import LoRAWeights
from loraplex.kernels.dispatch import NAIVE
from loraplex.kernels.kernel_set import Kernels
from loraplex.kernels.lora.batch import LoRABatch
from loraplex.kernels.lora.operands import LoRAOperand, LoRASlice

# Siblings that a transformers layer calls with the same input, under the name of their union.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

Batch = Callable[[], LoRABatch | None]


@dataclass(frozen=True)
class _Site:
    """One LoRA layer, and where in its output each adaptable module begins."""

    layer: LoRALayer
    starts: Mapping[str, int]  # a module's original name -> its first output column


class LoRASites:
    """Every place of a model that an adapter can change.

    Attributes:
        catalogue: the model's modules under their original names.
        num_slots: adapters that can be resident at once.
        dtype, device: the model's; an adapter is kept in both.
    """

    def __init__(self, model: nn.Module, catalogue: TargetCatalogue, num_slots: int) -> None:
        self.catalogue = catalogue
        self.num_slots = num_slots
        parameter = next(model.parameters())
        self.dtype = parameter.dtype
        self.device = parameter.device
        self._sites: list[_Site] = []

    def set(self, slot: int, weights: LoRAWeights) -> None:
        """Makes an adapter resident in a slot, replacing its content."""
        for site in self._sites:
            site.layer.set(slot, self._operand(site, weights))

    def clear(self, slot: int) -> None:
        """Empties a slot and frees its memory."""
        for site in self._sites:
            site.layer.set(slot, None)

    def embedding_weight(self, name: str) -> torch.Tensor:
        """Returns the base weight [vocabulary, hidden] of the input embedding or of lm_head, by
        name."""
        return next(
            cast(torch.Tensor, site.layer.weight) for site in self._sites if name in site.starts
        )

    def add(self, layer: LoRALayer, starts: Mapping[str, int]) -> None:
        self._sites.append(_Site(layer, starts))

    def _operand(self, site: _Site, weights: LoRAWeights) -> LoRAOperand | None:
        names = [name for name in site.starts if name in weights.modules]
        if not names:
            return None
        members = [weights.modules[name] for name in names]
        stacked = [self._on_device(member.a) for member in members]
        slices = tuple(
            LoRASlice(site.starts[name], self._on_device(member.b), member.scaling)
            for name, member in zip(names, members, strict=True)
        )
        return LoRAOperand(stacked[0] if len(stacked) == 1 else torch.cat(stacked), slices)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a tensor in the order of the device's work, without waiting where the tensor is
        pinned."""
        return tensor.to(self.device, non_blocking=True)


def inject_lora(
    model: nn.Module, context: LoRAContext, num_slots: int, kernels: Kernels = NAIVE
) -> LoRASites:
    """Replaces the adaptable modules of a transformers causal language model, in place.

    The model must be on its device and in its dtype already. Linears that share an input are fused,
    and their own weights are freed. Rows of the base model are computed as before.

    Args:
        context: what the layers read the running batch from; the caller sets it before a forward.
        num_slots: adapters that can be resident at once.
        kernels: what computes the deltas of the linears.
    """
    catalogue = catalogue_of(model)
    sites = LoRASites(model, catalogue, num_slots)
    hidden: Batch = partial(getattr, context, "hidden")
    logits: Batch = partial(getattr, context, "logits")
    for name, module in list(model.named_modules()):
        for union, members in FUSED.items():
            if _is_fusable(module, name, members, catalogue):
                fused = _fuse(
                    module,
                    union,
                    members,
                    partial(FusedLinear, batch=hidden, num_slots=num_slots, kernels=kernels),
                )
                sites.add(fused, _starts(name, members, catalogue))
    for name, target in catalogue.modules.items():
        parent, attribute = _parent(model, name)
        base = getattr(parent, attribute)
        if isinstance(base, FusedMember):
            continue
        layer: LoRALayer
        if target.kind is TargetKind.EMBEDDING:
            layer = LoRAEmbedding(base, hidden, num_slots, kernels)
        else:
            layer = LoRALinear(
                base, logits if target.kind is TargetKind.LM_HEAD else hidden, num_slots, kernels
            )
        setattr(parent, attribute, layer)
        sites.add(layer, {name: 0})
    return sites


def _is_fusable(
    parent: nn.Module, parent_name: str, members: Sequence[str], catalogue: TargetCatalogue
) -> bool:
    linears = [getattr(parent, member, None) for member in members]
    plain = [linear for linear in linears if type(linear) is nn.Linear]
    adaptable = all(_join(parent_name, member) in catalogue.modules for member in members)
    alike = {(linear.in_features, linear.bias is None, linear.weight.dtype) for linear in plain}
    return adaptable and len(plain) == len(members) and len(alike) == 1


def _fuse(
    parent: nn.Module,
    union: str,
    members: Sequence[str],
    make: Callable[[list[nn.Linear]], FusedLinear],
) -> FusedLinear:
    fused = make([getattr(parent, member) for member in members])
    for index, member in enumerate(members):
        setattr(parent, member, FusedMember(fused, index))
    parent.add_module(union, fused)
    return fused


def _starts(parent_name: str, members: Sequence[str], catalogue: TargetCatalogue) -> dict[str, int]:
    names = [_join(parent_name, member) for member in members]
    widths = [catalogue.modules[name].out_features for name in names]
    return dict(zip(names, accumulate(widths[:-1], initial=0), strict=True))


def _join(parent_name: str, attribute: str) -> str:
    return f"{parent_name}.{attribute}" if parent_name else attribute


def _parent(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute
