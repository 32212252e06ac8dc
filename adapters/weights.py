"""LoRAWeights: the tensors of one adapter, checked against the base model that they are for."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from loraplex.adapters.errors import AdapterRejected, listed, shown
from loraplex.adapters.safetensors_file import SafetensorsFile
from loraplex.adapters.targets import AdapterTarget, TargetKind
from loraplex.kernels.pinned_memory import pinned

# PEFT's names, for example base_model.model.model.layers.0.mlp.up_proj.lora_A.weight
_KEY = re.compile(
    r"base_model\.model\.(?P<module>.+?)\."
    r"(?P<part>lora_A\.weight|lora_B\.weight|lora_embedding_A|lora_embedding_B|base_layer\.weight)"
)
_PARTS = {
    TargetKind.LINEAR: ("lora_A.weight", "lora_B.weight"),
    TargetKind.LM_HEAD: ("lora_A.weight", "lora_B.weight"),
    TargetKind.EMBEDDING: ("lora_embedding_A", "lora_embedding_B"),
}
_BASE_COPY = "base_layer.weight"
_PREFIX = "base_model.model."
_FEATURE_KEYS = {
    "lora_magnitude_vector": "DoRA is not supported, but the file has magnitude vectors",
    "lora_B.bias": "a bias in LoRA B is not supported, but the file has one",
    "modules_to_save": "full copies of modules (modules_to_save) are not supported",
}


@dataclass(frozen=True)
class ModuleWeights:
    """LoRA on one module: out += scaling * B (A x)."""

    a: torch.Tensor  # [rank, in]; [rank, vocabulary] for an embedding
    b: torch.Tensor  # [out, rank]
    scaling: float


@dataclass(frozen=True)
class LoRAWeights:
    """One adapter on the host, in the engine's dtype and in one piece of memory."""

    modules: Mapping[str, ModuleWeights]  # by the module's name in the base model
    num_bytes: int


@dataclass
class _Sorted:
    """The tensors of a file by what they are."""

    lora: dict[str, dict[str, str]] = field(default_factory=dict)  # module -> part -> tensor name
    base_copies: dict[str, str] = field(default_factory=dict)  # module -> tensor name
    faults: list[str] = field(default_factory=list)


def read_weights(
    file: SafetensorsFile,
    targets: Mapping[str, AdapterTarget],
    dtype: torch.dtype,
    base_weight: Callable[[str], torch.Tensor],
    *,
    pin_memory: bool = False,
) -> LoRAWeights:
    """Reads an adapter whose tensors must be exactly those that `targets` calls for.

    Args:
        file: the weights file, its header already checked.
        targets: the modules that the adapter's config names, by name.
        dtype: the engine's; values must be finite in it.
        base_weight: gives the base weight of an embedding or of lm_head, by name. PEFT saves copies
            of these beside LoRA on them, which must be the same.
        pin_memory: put it where a GPU can read it by itself.

    Raises:
        AdapterRejected: tensors without a module or modules without tensors, wrong shapes, values
            that are not finite, other base weights.
    """
    found = _sort(file, targets)
    faults = found.faults + _missing(found, targets)
    faults += [fault for name in found.lora for fault in _shape_faults(file, found, targets[name])]
    if faults:
        raise AdapterRejected([_count(found, targets), *faults])
    tensors = file.read()
    faults += _base_faults(tensors, found, base_weight)
    keys = [
        found.lora[name][part]
        for name, target in targets.items()
        for part in _PARTS[target.module.kind]
    ]
    memory, copies = _in_one_piece([tensors[key] for key in keys], dtype, pin_memory)
    if not torch.isfinite(memory).all():
        faults += [fault for key in keys for fault in _value_faults(key, tensors[key], dtype)]
    if faults:
        raise AdapterRejected(faults)
    parts = iter(copies)
    modules = {
        name: ModuleWeights(next(parts), next(parts), target.scaling)
        for name, target in targets.items()
    }
    return LoRAWeights(modules, memory.nbytes)


def _in_one_piece(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype, pin_memory: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Copies side by side: all their memory, and each. Tensors of the file are views of a mapping,
    which would be read from disk at their first use."""
    sizes = [tensor.numel() for tensor in tensors]
    make = pinned if pin_memory else torch.empty
    memory = make(sum(sizes), dtype=dtype)
    copies = [
        part.view(tensor.shape).copy_(tensor)
        for part, tensor in zip(torch.split(memory, sizes), tensors, strict=True)
    ]
    return memory, copies


def _sort(file: SafetensorsFile, targets: Mapping[str, AdapterTarget]) -> _Sorted:
    found = _Sorted()
    unmatched = []
    for key in file.shapes:
        match = _KEY.fullmatch(key)
        module, part = (match["module"], match["part"]) if match else ("", "")
        target = targets.get(module)
        if target and part in _PARTS[target.module.kind]:
            found.lora.setdefault(module, {})[part] = key
        elif target and part == _BASE_COPY and target.module.kind is not TargetKind.LINEAR:
            found.base_copies[module] = key
        else:
            unmatched.append(key)
    found.faults += _unmatched_faults(unmatched)
    return found


def _unmatched_faults(keys: list[str]) -> list[str]:
    if not keys:
        return []
    features = [text for mark, text in _FEATURE_KEYS.items() if any(mark in key for key in keys)]
    full = [key for key in keys if key.startswith(_PREFIX) and ".lora_" not in key]
    if full:
        features.append(
            f"full copies of modules (modules_to_save) are not supported: {listed(full)}"
        )
    return [*features, f"tensors that belong to no adapted module: {listed(keys)}"]


def _missing(found: _Sorted, targets: Mapping[str, AdapterTarget]) -> list[str]:
    absent = [
        f"{name}.{part}"
        for name, target in targets.items()
        for part in _PARTS[target.module.kind]
        if part not in found.lora.get(name, {})
    ]
    return [f"modules without their tensors: {listed(absent)}"] if absent else []


def _count(found: _Sorted, targets: Mapping[str, AdapterTarget]) -> str:
    complete = sum(len(parts) == 2 for parts in found.lora.values())
    return f"{complete} of {len(targets)} modules matched"


def _shape_faults(file: SafetensorsFile, found: _Sorted, target: AdapterTarget) -> list[str]:
    module = target.module
    a, b = _PARTS[module.kind]
    wanted = {a: (target.rank, module.in_features), b: (module.out_features, target.rank)}
    return [
        f"tensor {shown(key)} must have shape {list(wanted[part])} "
        f"(rank {target.rank} by the config), got {list(file.shapes[key])}"
        for part, key in found.lora[module.name].items()
        if file.shapes[key] != wanted[part]
    ]


def _base_faults(
    tensors: Mapping[str, torch.Tensor],
    found: _Sorted,
    base_weight: Callable[[str], torch.Tensor],
) -> list[str]:
    faults = []
    for name, key in found.base_copies.items():
        copy, base = tensors[key], base_weight(name)
        if copy.shape != base.shape:
            shapes = f"{list(copy.shape)}, the base model's is {list(base.shape)}"
            faults.append(f"tensor {shown(key)} has shape {shapes}")
        elif not torch.equal(copy.to(base.dtype).to(base.device), base):
            faults.append(
                f"tensor {shown(key)} differs from the base model's weight; a changed base weight "
                "is not supported"
            )
    return faults


def _value_faults(key: str, tensor: torch.Tensor, dtype: torch.dtype) -> list[str]:
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        return [f"tensor {shown(key)} has {bad} values that are not finite"]
    large = int((~torch.isfinite(tensor.to(dtype))).sum())
    if large:
        name = str(dtype).removeprefix("torch.")
        return [f"tensor {shown(key)} has {large} values too large for {name}"]
    return []
