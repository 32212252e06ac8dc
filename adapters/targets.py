"""catalogue_of: lists a model's adaptable modules, from the model itself."""

from collections.abc import Callable
from typing import cast

from torch import nn
from transformers.pytorch_utils import Conv1D

from loraplex.adapters.checks.catalogue import TargetCatalogue, TargetKind, TargetModule


def catalogue_of(model: nn.Module) -> TargetCatalogue:
    """Lists the modules of a transformers causal language model, before any is replaced."""
    modules: dict[str, TargetModule] = {}
    others: dict[str, bool] = {}
    embedding, lm_head = _embeddings(model)
    for name, module in model.named_modules():
        kind = _kind(name, module, embedding, lm_head)
        if kind is None:
            others[name] = isinstance(module, nn.Linear | Conv1D)
        else:
            modules[name] = TargetModule(name, kind, *_features(module))
    return TargetCatalogue(modules, others)


def _embeddings(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    getters: list[Callable[[], nn.Module | None]] = [
        getattr(model, name) for name in ("get_input_embeddings", "get_output_embeddings")
    ]
    return getters[0](), getters[1]()


def _kind(
    name: str, module: nn.Module, embedding: nn.Module | None, lm_head: nn.Module | None
) -> TargetKind | None:
    if isinstance(module, nn.Embedding):
        return TargetKind.EMBEDDING if module is embedding else None
    if not isinstance(module, nn.Linear | Conv1D):
        return None
    if module is lm_head:
        return TargetKind.LM_HEAD
    parts = name.split(".")
    # An expert sees a permuted part of the batch, so the row of a token is not known there.
    routed = "experts" in parts or parts[-1] in ("router", "gate")
    return None if routed else TargetKind.LINEAR


def _features(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    rows, columns = cast(nn.Parameter, module.weight).shape  # a Conv1D's is transposed
    return rows, columns
