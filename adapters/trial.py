"""Tries an adapter on numbers of usual size before it serves requests."""

from collections.abc import Mapping

import torch

from loraplex.adapters.checks.catalogue import TargetKind, TargetModule
from loraplex.adapters.errors import listed
from loraplex.adapters.weights import LoRAWeights, ModuleWeights

_NUM_TOKENS = 64  # of an embedding
_ROWS = 4096  # of B at a time


def trial_faults(weights: LoRAWeights, modules: Mapping[str, TargetModule]) -> list[str]:
    """Returns what keeps an adapter of finite weights from giving finite deltas: they are too
    large.

    Args:
        weights: on the host, in the engine's dtype.
        modules: the base model's, by name.
    """
    generator = torch.Generator().manual_seed(0)
    bad = [
        name
        for name, module in weights.modules.items()
        if not _gives_finite(module, modules[name].kind, generator)
    ]
    if not bad:
        return []
    return [
        "the adapter's weights are too large: nothing finite comes out of "
        f"{listed(bad)} for inputs of usual size"
    ]


def _gives_finite(module: ModuleWeights, kind: TargetKind, generator: torch.Generator) -> bool:
    if kind is TargetKind.EMBEDDING:
        count = min(_NUM_TOKENS, module.a.shape[1])
        tokens = torch.randperm(module.a.shape[1], generator=generator)[:count]
        shrunk = module.a[:, tokens].float()
    else:
        # What reaches a linear is normed: its numbers are about one.
        shrunk = module.a.float() @ torch.randn(module.a.shape[1], 1, generator=generator)
    return all(
        bool((module.scaling * (rows.float() @ shrunk)).to(module.b.dtype).isfinite().all())
        for rows in torch.split(module.b, _ROWS)
    )
