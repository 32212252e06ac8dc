"""What a registration is given and what it finds out. Torch-free."""

from dataclasses import dataclass
from pathlib import Path

from loraplex.adapters.manifest import Activation, AdapterRef


@dataclass(frozen=True)
class StoredCopy:
    """Names an adapter in the store.

    Args:
        digest: what its content must have.
        origin: the folder that it came from, out of which a damaged copy is mended.
    """

    digest: str
    origin: Path | None = None


@dataclass(frozen=True)
class RegisteredAdapter:
    """The result of a registration."""

    ref: AdapterRef
    rank: int  # the largest in it
    target_modules: list[str]  # last name parts, sorted
    num_modules: int
    num_bytes: int  # in the engine's dtype
    activation: Activation
    frontier: int  # the layers below it store what they store without the adapter
    base_model: str  # what its config says that it was trained on
    base_mismatch: bool  # that is another name than the served model's, and was accepted
