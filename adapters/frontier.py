"""The layer frontier: the lowest layer whose keys and values an adapter changes."""

from collections.abc import Iterable

from loraplex.adapters.checks.catalogue import TargetKind, TargetModule

EVERY_LAYER = 2**31  # no layer's keys and values change

# Linears that act on what their layer hands on, but not on the keys and values it stores. A name
# that is missing here costs sharing, one that is wrong here would cost correctness.
_BEHIND_KV = (
    {"q_proj", "o_proj", "out_proj"}
    | {"gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2"}
    | {"c_fc", "c_proj", "dense_h_to_4h", "dense_4h_to_h"}
)


def frontier(modules: Iterable[TargetModule]) -> int:
    """Returns how many of the lowest layers store exactly what they store without the adapter.

    The keys and values of layer l depend on its input, and on its K and V projections. So the first
    layer with LoRA on these is the first that differs; LoRA on the rest of a layer, its queries
    included, shows in the layer above it. LoRA on the embedding changes every layer, LoRA on
    lm_head none.

    Returns:
        min(first layer with K or V adapted, first layer with anything else adapted + 1), 0 where
        that cannot be told, `EVERY_LAYER` where no layer is adapted.
    """
    return min(map(_first_changed, modules), default=EVERY_LAYER)


def _first_changed(module: TargetModule) -> int:
    if module.kind is TargetKind.LM_HEAD:
        return EVERY_LAYER
    parts = module.name.split(".")
    layer = next((int(part) for part in parts if part.isdecimal()), None)
    if layer is None or module.kind is TargetKind.EMBEDDING:
        return 0
    return layer + 1 if parts[-1] in _BEHIND_KV else layer
