"""Finds the tensors of a weights file that an adapter's modules need. Torch-free."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from loraplex.adapters.checks.catalogue import AdapterTarget, TargetCatalogue, TargetKind
from loraplex.adapters.checks.plan import AdapterPlan, BaseCopy, PlannedModule, TensorSpan
from loraplex.adapters.errors import AdapterRejected, listed, shown
from loraplex.adapters.manifest import AdapterManifest

# PEFT's names, for example base_model.model.model.layers.0.mlp.up_proj.lora_A.weight; what
# transformers saves of a model with an adapter in it lacks the prefix.
_PREFIX = "base_model.model."
_LORA = re.compile(
    r"(?P<module>.+?)\."
    r"(?P<part>lora_A\.weight|lora_B\.weight|lora_embedding_A|lora_embedding_B)"
)
_BASE_COPY = re.compile(r"(?P<module>.+?)\.((base_layer|modules_to_save|original_module)\.)?weight")
_PARTS = {
    TargetKind.LINEAR: ("lora_A.weight", "lora_B.weight"),
    TargetKind.LM_HEAD: ("lora_A.weight", "lora_B.weight"),
    TargetKind.EMBEDDING: ("lora_embedding_A", "lora_embedding_B"),
}
_FEATURE_KEYS = {
    "lora_magnitude_vector": "DoRA is not supported, but the file has magnitude vectors",
    "lora_B.bias": "a bias in LoRA B is not supported, but the file has one",
    "modules_to_save": "full copies of modules (modules_to_save) are not supported",
}


@dataclass
class _Found:
    """The tensors of a file, by what they are."""

    lora: dict[str, dict[str, TensorSpan]] = field(default_factory=dict)  # by module and part
    base_copies: list[BaseCopy] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def make_plan(
    spans: Iterable[TensorSpan],
    file_size: int,
    manifest: AdapterManifest,
    targets: Mapping[str, AdapterTarget],
    base: TargetCatalogue,
) -> AdapterPlan:
    """Returns where to find what `targets` need. The tensors must be exactly those, beside copies
    of the input embedding and of lm_head.

    Raises:
        AdapterRejected: tensors without a module, modules without tensors, two for one, or wrong
            shapes.
    """
    found = _sort(spans, targets, base)
    faults = found.faults + _missing(found, targets) + _missing_copies(found, manifest)
    for name, parts in found.lora.items():
        faults += _shape_faults(parts, targets[name])
    if faults:
        raise AdapterRejected([_count(found, targets), *faults])
    return AdapterPlan(
        base=base.fingerprint,
        manifest=manifest,
        modules=[_planned(target, found.lora[name]) for name, target in targets.items()],
        base_copies=found.base_copies,
        file_size=file_size,
    )


def _planned(target: AdapterTarget, parts: Mapping[str, TensorSpan]) -> PlannedModule:
    a, b = (parts[part] for part in _PARTS[target.module.kind])
    return PlannedModule(target.module.name, target.rank, target.scaling, a, b)


def _sort(
    spans: Iterable[TensorSpan], targets: Mapping[str, AdapterTarget], base: TargetCatalogue
) -> _Found:
    found = _Found()
    unmatched, twice = [], []
    for span in spans:
        key = span.name.removeprefix(_PREFIX)
        match = _LORA.fullmatch(key)
        module, part = (match["module"], match["part"]) if match else ("", "")
        target = targets.get(module)
        if target and part in _PARTS[target.module.kind]:
            if found.lora.setdefault(module, {}).setdefault(part, span) is not span:
                twice.append(span.name)
        elif copied := _copied(key, base):
            found.base_copies.append(BaseCopy(copied, span))
        else:
            unmatched.append(span.name)
    if twice:
        found.faults.append(
            f"tensors that are there twice, with and without prefix: {listed(twice)}"
        )
    found.faults += _unmatched_faults(unmatched)
    return found


def _copied(key: str, base: TargetCatalogue) -> str | None:
    """Returns the module whose weight a tensor copies, if that weight can be compared."""
    match = _BASE_COPY.fullmatch(key)
    module = base.modules.get(match["module"]) if match else None
    return None if module is None or module.kind is TargetKind.LINEAR else module.name


def _unmatched_faults(keys: list[str]) -> list[str]:
    if not keys:
        return []
    features = [text for mark, text in _FEATURE_KEYS.items() if any(mark in key for key in keys)]
    full = [key for key in keys if key.endswith((".weight", ".bias")) and ".lora_" not in key]
    if full:
        features.append(
            f"full copies of modules (modules_to_save) are not supported: {listed(full)}"
        )
    return [*features, f"tensors that belong to no adapted module: {listed(keys)}"]


def _missing(found: _Found, targets: Mapping[str, AdapterTarget]) -> list[str]:
    absent = [
        f"{name}.{part}"
        for name, target in targets.items()
        for part in _PARTS[target.module.kind]
        if part not in found.lora.get(name, {})
    ]
    return [f"modules without their tensors: {listed(absent)}"] if absent else []


def _missing_copies(found: _Found, manifest: AdapterManifest) -> list[str]:
    copied = Counter(copy.module for copy in found.base_copies)
    absent = [
        saved
        for saved in manifest.saved_modules
        if not any(module.endswith(saved) for module in copied)
    ]
    if not absent:
        return []
    return [f"modules_to_save names modules whose copies are not there: {listed(absent)}"]


def _count(found: _Found, targets: Mapping[str, AdapterTarget]) -> str:
    complete = sum(len(parts) == 2 for parts in found.lora.values())
    return f"{complete} of {len(targets)} modules matched"


def _shape_faults(parts: Mapping[str, TensorSpan], target: AdapterTarget) -> list[str]:
    module = target.module
    a, b = _PARTS[module.kind]
    wanted = {a: (target.rank, module.in_features), b: (module.out_features, target.rank)}
    return [
        f"tensor {shown(span.name)} must have shape {list(wanted[part])} "
        f"(rank {target.rank} by the config), got {list(span.shape)}"
        for part, span in parts.items()
        if span.shape != wanted[part]
    ]
