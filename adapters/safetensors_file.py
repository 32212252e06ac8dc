"""Opens a safetensors file that nobody trusts: its header is checked before a tensor is touched."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from loraplex.adapters.errors import AdapterRejected, shown

MAX_HEADER_BYTES = 16 << 20

_ITEM_SIZES = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8}
_PICKLES = (b"PK\x03\x04", b"\x80")  # what torch.save writes

_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=4)]
    data_offsets: tuple[_Size, _Size]

    def faults(self) -> list[str]:
        if self.dtype not in _ITEM_SIZES:
            return [f"dtype {shown(self.dtype)} is not one of {', '.join(_ITEM_SIZES)}"]
        start, stop = self.data_offsets
        needed = math.prod(self.shape) * _ITEM_SIZES[self.dtype]
        if stop - start != needed:
            return [f"shape {self.shape} needs {needed} bytes, the header gives {stop - start}"]
        return []


@dataclass(frozen=True)
class SafetensorsFile:
    """A file whose header is sound: float tensors that fill it exactly, one after another."""

    path: Path
    shapes: dict[str, tuple[int, ...]]  # by tensor name

    def read(self) -> dict[str, torch.Tensor]:
        """Every tensor, on the host and in the file's dtype.

        Raises:
            AdapterRejected: the file is no longer what its header said.
        """
        try:
            with safe_open(self.path, framework="pt", device="cpu") as file:
                return {name: file.get_tensor(name) for name in self.shapes}
        except (SafetensorError, OSError) as error:
            raise AdapterRejected(["the weights file cannot be read"]) from error


def open_safetensors(path: Path) -> SafetensorsFile:
    """Checks a file's header. What the file is called does not matter, only what is in it.

    Raises:
        AdapterRejected: not safetensors, or a header that does not fit the file.
        OSError: the file cannot be read at all.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            what = "a pickle" if prefix.startswith(_PICKLES) else f"a header of {length} bytes"
            raise AdapterRejected([f"the weights file is not safetensors: it has {what}"])
        header = file.read(length)
    entries = _entries(header)
    faults = [
        f"tensor {shown(name)}: {fault}"
        for name, entry in entries.items()
        for fault in entry.faults()
    ]
    if not faults and not _fill(entries.values(), size - 8 - length):
        faults.append("its tensors do not fill it exactly; it may have been cut short")
    if faults:
        raise AdapterRejected([f"the weights file is damaged: {fault}" for fault in faults[:8]])
    return SafetensorsFile(path, {name: tuple(entry.shape) for name, entry in entries.items()})


def _entries(header: bytes) -> dict[str, _Entry]:
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        return {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterRejected([f"the weights file has no valid header: {error}"]) from error


def _fill(entries: Iterable[_Entry], size: int) -> bool:
    end = 0
    for start, stop in sorted(entry.data_offsets for entry in entries):
        if start != end:
            return False
        end = stop
    return end == size
