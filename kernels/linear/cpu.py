"""A linear layer over packed weights, in bfloat16 or float32: few rows at the speed of memory."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.kernels.linear.format import LinearFormat
from loraplex.kernels.native.huge_pages import HugePages
from loraplex.kernels.native.library import launch, num_threads
from loraplex.kernels.native.panels import panels_shape, unpack_panels

_GRAIN = 64 * 1024  # bytes of weights worth a thread
_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "float"}


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] in the order in which the kernel reads it, padded with zeros."""

    panels: Tensor  # [ceil(N / 32), ceil(K / step), 32, step], contiguous; step: numbers of a word
    shape: tuple[int, int]  # N, K

    @staticmethod
    def num_bytes(weight: Tensor) -> int:
        """Returns the bytes of the panels of a weight [N, K]."""
        rows, columns = weight.shape
        return math.prod(panels_shape(rows, columns, weight.dtype)) * weight.itemsize

    @classmethod
    def pack(cls, weight: Tensor, memory: HugePages | None = None) -> "PackedWeight":
        """Packs a weight [N, K], into `memory` where that is given."""
        rows, columns = weight.shape
        shape = panels_shape(rows, columns, weight.dtype)
        panels = (memory.empty if memory else torch.empty)(*shape, dtype=weight.dtype)
        weight = _whole_words(weight)
        launch(
            f"lpx_pack_panels_{_SUFFIXES[weight.dtype]}",
            weight,
            weight.stride(0),
            panels,
            rows,
            shape[1] * shape[3],
            num_threads(weight.numel(), _GRAIN),
        )
        return cls(panels, (rows, columns))

    def unpack(self) -> Tensor:
        """-> [N, K], a copy."""
        return unpack_panels(self.panels, self.shape)

    def rows(self, ids: Tensor) -> Tensor:
        """ids [...] int64 below N -> [..., K]: rows of the weight, as an embedding."""
        ids = ids.contiguous()
        columns = self.shape[1]
        out = torch.empty(*ids.shape, columns, dtype=self.panels.dtype)
        launch(
            f"lpx_packed_rows_{_SUFFIXES[out.dtype]}",
            self.panels,
            ids,
            out,
            ids.numel(),
            self.panels.shape[1] * self.panels.shape[3],
            columns,
            num_threads(out.numel(), _GRAIN),
        )
        return out


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [..., K] in the weight's dtype, bias [N] float32 -> [..., N]; sums are float32."""
    num_columns, depth = weight.shape
    rows = _whole_words(x.reshape(-1, depth))
    out = torch.empty(*x.shape[:-1], num_columns, dtype=x.dtype)
    launch(
        f"lpx_linear_{_SUFFIXES[x.dtype]}",
        rows,
        weight.panels,
        bias,
        out,
        rows.shape[0],
        num_columns,
        weight.panels.shape[1] * weight.panels.shape[3],
        rows.stride(0),
        num_columns,
        num_threads(weight.panels.nbytes, _GRAIN),
    )
    return out


def _whole_words(x: Tensor) -> Tensor:
    """[T, K] -> [T, K or K + 1] with rows that can be read by words of four bytes."""
    step = 4 // x.itemsize
    if x.shape[1] % step:
        return torch.nn.functional.pad(x, (0, 1))
    return x if x.stride(1) == 1 and x.stride(0) % step == 0 else x.contiguous()


FORMAT = LinearFormat(tuple(_SUFFIXES), PackedWeight.pack, linear, PackedWeight.num_bytes)
