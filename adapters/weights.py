"""LoRAWeights: the tensors of one adapter, read as its plan says and compared with its digest."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

import torch

from loraplex.adapters.checks.plan import AdapterPlan, BaseCopy, TensorSpan
from loraplex.adapters.errors import AdapterRejected, shown
from loraplex.kernels.pinned_memory import pinned

_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_PIECE = 1 << 20  # bytes that are read at a time where nothing is kept of them


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


@dataclass(frozen=True)
class ReadWeights:
    """What a weights file holds."""

    weights: LoRAWeights
    sha256: str  # of the whole file
    faults: list[str]  # what keeps it from being served


def read_weights(
    file: BinaryIO,
    plan: AdapterPlan,
    dtype: torch.dtype,
    base_weight: Callable[[str], torch.Tensor],
    *,
    pin_memory: bool = False,
) -> ReadWeights:
    """Reads a weights file once, from beginning to end.

    The file is read and not mapped, so that a change of it meanwhile changes its digest and nothing
    else.

    Args:
        file: at its beginning.
        plan: what is where in it.
        dtype: the engine's; values must be finite in it.
        base_weight: gives the base weight of an embedding or of lm_head, by name. PEFT saves copies
            of these, which must be the same.
        pin_memory: put the weights where a GPU can read them by itself.

    Raises:
        AdapterRejected: the file is shorter than its plan says.
    """
    parts = [span for module in plan.modules for span in (module.a, module.b)]
    sizes = [math.prod(part.shape) for part in parts]
    memory = (pinned if pin_memory else torch.empty)(sum(sizes), dtype=dtype)
    places = [
        place.view(part.shape)
        for part, place in zip(parts, torch.split(memory, sizes), strict=True)
    ]
    uses: list[tuple[TensorSpan, Callable[[torch.Tensor], list[str]]]] = [
        *((part, partial(_keep, part, place)) for part, place in zip(parts, places, strict=True)),
        *((copy.tensor, partial(_compare, copy, base_weight)) for copy in plan.base_copies),
    ]
    stream = _HashedFile(file)
    faults = [
        fault
        for span, use in sorted(uses, key=lambda item: item[0].start)
        for fault in use(stream.tensor(span))
    ]
    pairs = zip(places[::2], places[1::2], strict=True)
    modules = {
        module.name: ModuleWeights(a, b, module.scaling)
        for module, (a, b) in zip(plan.modules, pairs, strict=True)
    }
    return ReadWeights(LoRAWeights(modules, memory.nbytes), stream.finish(), faults)


class _HashedFile:
    """A file that is read forward, once, and hashed on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._position = 0
        self._hash = hashlib.sha256()

    def tensor(self, span: TensorSpan) -> torch.Tensor:
        """Returns the tensor at `span`, which must not begin before the end of the last one.

        Raises:
            AdapterRejected: the file ends before it does.
        """
        while self._position < span.start:
            self._read(min(_PIECE, span.start - self._position))
        data = self._read(span.num_bytes)
        if not data:
            return torch.empty(span.shape, dtype=_DTYPES[span.dtype])
        return torch.frombuffer(data, dtype=_DTYPES[span.dtype]).view(span.shape)

    def finish(self) -> str:
        """Returns the SHA-256 of the whole file, including the part not read yet."""
        while rest := self._file.read(_PIECE):
            self._hash.update(rest)
        return self._hash.hexdigest()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        if self._file.readinto(data) < size:  # type: ignore[attr-defined]
            raise AdapterRejected(["the weights file has been cut short"])
        self._hash.update(data)
        self._position += size
        return data


def _keep(span: TensorSpan, place: torch.Tensor, tensor: torch.Tensor) -> list[str]:
    """Copies a tensor to its place in the engine's dtype; returns the faults of its values."""
    place.copy_(tensor)
    if torch.isfinite(place).all():
        return []
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        return [f"tensor {shown(span.name)} has {bad} values that are not finite"]
    large = int((~torch.isfinite(place)).sum())
    name = str(place.dtype).removeprefix("torch.")
    return [f"tensor {shown(span.name)} has {large} values too large for {name}"]


def _compare(
    copy: BaseCopy, base_weight: Callable[[str], torch.Tensor], tensor: torch.Tensor
) -> list[str]:
    """Returns the faults of a copy of a base weight: anything but that weight is one."""
    key, base = shown(copy.tensor.name), base_weight(copy.module)
    if tensor.shape != base.shape:
        shapes = f"{list(tensor.shape)}, the base model's is {list(base.shape)}"
        return [f"tensor {key} has shape {shapes}"]
    if not torch.equal(tensor.to(base.dtype).to(base.device), base):
        return [
            f"tensor {key} differs from the base model's weight; full copies that were trained "
            "(modules_to_save) or resized are not supported"
        ]
    return []
