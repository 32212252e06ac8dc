"""Reads the header of an untrusted safetensors file; no tensor is touched. Torch-free."""

import math
from collections.abc import Iterable
from typing import Annotated, BinaryIO

import msgspec

from loraplex.adapters.checks.plan import ITEM_SIZES, TensorSpan
from loraplex.adapters.errors import AdapterRejected, shown

MAX_HEADER_BYTES = 16 << 20

_PICKLES = (b"PK\x03\x04", b"\x80")  # what torch.save writes

_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=4)]
    data_offsets: tuple[_Size, _Size]

    def faults(self) -> list[str]:
        if self.dtype not in ITEM_SIZES:
            return [f"dtype {shown(self.dtype)} is not one of {', '.join(ITEM_SIZES)}"]
        start, stop = self.data_offsets
        needed = math.prod(self.shape) * ITEM_SIZES[self.dtype]
        if stop - start != needed:
            return [f"shape {self.shape} needs {needed} bytes, the header gives {stop - start}"]
        return []


def read_header(file: BinaryIO, size: int) -> list[TensorSpan]:
    """Returns the tensors of a file of `size` bytes: floats that fill it exactly, one after
    another. Only the file's content matters, not its name.

    Raises:
        AdapterRejected: not safetensors, or a header that does not fit the file. No content of a
            file that is something else is shown.
        OSError: the file cannot be read at all.
    """
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        is_pickle = prefix.startswith(_PICKLES)
        what = "it is a pickle" if is_pickle else "its header does not fit"
        raise AdapterRejected([f"the weights file is not safetensors: {what}"])
    entries = _entries(file.read(length))
    faults = [
        f"the weights file is damaged: tensor {shown(name)}: {fault}"
        for name, entry in entries.items()
        for fault in entry.faults()
    ]
    if not faults and not _fill(entries.values(), size - 8 - length):
        what = "its tensors do not fill it exactly; it may have been cut short"
        faults.append(f"the weights file is damaged: {what}")
    if faults:
        raise AdapterRejected(faults)
    return [
        TensorSpan(name, entry.dtype, tuple(entry.shape), 8 + length + entry.data_offsets[0])
        for name, entry in entries.items()
    ]


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
