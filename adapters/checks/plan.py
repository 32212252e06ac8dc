"""AdapterPlan: the result of a check, so that nothing is checked twice. Torch-free."""

import math

import msgspec

from loraplex.adapters.manifest import AdapterManifest

ITEM_SIZES = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8}


class TensorSpan(msgspec.Struct, frozen=True, array_like=True):
    """The place of one tensor in the weights file."""

    name: str
    dtype: str  # one of ITEM_SIZES
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]

    @property
    def stop(self) -> int:
        return self.start + self.num_bytes


class PlannedModule(msgspec.Struct, frozen=True, array_like=True):
    """LoRA on one module: out += scaling * B (A x)."""

    name: str  # in the base model
    rank: int
    scaling: float
    a: TensorSpan  # [rank, in]; [rank, vocabulary] for an embedding
    b: TensorSpan  # [out, rank]


class BaseCopy(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that must equal a base weight, since it would replace it."""

    module: str
    tensor: TensorSpan


class AdapterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How to load one adapter into one base model."""

    base: str  # TargetCatalogue.fingerprint
    manifest: AdapterManifest
    modules: list[PlannedModule]
    base_copies: list[BaseCopy]
    file_size: int
