"""A bfloat16 linear layer over packed weights: few rows at the speed of memory."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.kernels.linear.format import LinearFormat
from loraplex.kernels.native.huge_pages import HugePages
from loraplex.kernels.native.library import launch, num_threads
from loraplex.kernels.native.panels import panels_shape, unpack_panels

_GRAIN = 64 * 1024  # bytes of weights worth a thread


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] in the order in which the kernel reads it, padded with zeros."""

    panels: Tensor  # [ceil(N / 32), ceil(K / 2), 32, 2] bfloat16, contiguous
    shape: tuple[int, int]  # N, K

    @staticmethod
    def num_bytes(rows: int, columns: int) -> int:
        """Of the panels of a weight [rows, columns]."""
        return math.prod(panels_shape(rows, columns, torch.bfloat16)) * torch.bfloat16.itemsize

    @classmethod
    def pack(cls, weight: Tensor, memory: HugePages | None = None) -> "PackedWeight":
        """Packs a weight [N, K] in bfloat16, into `memory` where that is given."""
        rows, columns = weight.shape
        shape = panels_shape(rows, columns, torch.bfloat16)
        panels = (memory.empty if memory else torch.empty)(*shape, dtype=torch.bfloat16)
        weight = _even_rows(weight)
        launch(
            "lpx_pack_panels_bf16",
            weight,
            weight.stride(0),
            panels,
            rows,
            shape[1] * 2,
            num_threads(weight.numel(), _GRAIN),
        )
        return cls(panels, (rows, columns))

    def unpack(self) -> Tensor:
        """-> [N, K] bfloat16, a copy."""
        return unpack_panels(self.panels, self.shape)

    def rows(self, ids: Tensor) -> Tensor:
        """ids [...] int64 below N -> [..., K] bfloat16: rows of the weight, as an embedding."""
        ids = ids.contiguous()
        steps, columns = self.panels.shape[1], self.shape[1]
        out = torch.empty(*ids.shape, columns, dtype=torch.bfloat16)
        launch(
            "lpx_packed_rows_bf16",
            self.panels,
            ids,
            out,
            ids.numel(),
            steps * 2,
            columns,
            num_threads(out.numel(), _GRAIN),
        )
        return out


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [..., K] bfloat16, bias [N] float32 -> [..., N] bfloat16; sums are float32."""
    num_columns, depth = weight.shape
    padded = weight.panels.shape[1] * 2
    rows = _even_rows(x.reshape(-1, depth))
    out = torch.empty(*x.shape[:-1], num_columns, dtype=torch.bfloat16)
    launch(
        "lpx_linear_bf16",
        rows,
        weight.panels,
        bias,
        out,
        rows.shape[0],
        num_columns,
        padded,
        rows.stride(0),
        num_columns,
        num_threads(weight.panels.numel() * 2, _GRAIN),
    )
    return out


def _even_rows(x: Tensor) -> Tensor:
    """[T, K] -> [T, K or K + 1] with rows that can be read by pairs."""
    if x.shape[1] % 2:
        return torch.nn.functional.pad(x, (0, 1))
    return x if x.stride(1) == 1 and x.stride(0) % 2 == 0 else x.contiguous()


FORMAT = LinearFormat(PackedWeight.pack, linear, PackedWeight.num_bytes)
