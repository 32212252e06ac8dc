"""A linear layer with eight-bit weights and activations in native code."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.kernels.int8_linear.naive import GROUP
from loraplex.kernels.linear.format import LinearFormat
from loraplex.kernels.native.huge_pages import HugePages
from loraplex.kernels.native.library import launch, num_threads
from loraplex.kernels.native.panels import PANEL

_STEP = 4  # inputs that one lane of a product takes
_GRAIN = 64 * 1024  # bytes of weights worth a thread


@dataclass(frozen=True)
class Int8Weight:
    """A weight [N, K] as integers, in the order in which the kernel reads them."""

    panels: Tensor  # [ceil(N / 32), ceil(K / 4), 32, 4] int8, contiguous
    offsets: Tensor  # [ceil(N / 32), ceil(K / 64), 32] int32, for activations with 128 added
    scales: Tensor  # [ceil(N / 32) * 32] float32
    shape: tuple[int, int]  # N, K

    @staticmethod
    def num_bytes(weight: Tensor) -> int:
        """Returns the bytes of the panels of a weight [N, K]."""
        rows, columns = weight.shape
        return -(-rows // PANEL) * PANEL * -(-columns // _STEP) * _STEP

    @classmethod
    def pack(cls, weight: Tensor, memory: HugePages | None = None) -> "Int8Weight":
        """Rounds a weight [N, K] in bfloat16; its panels go into `memory` where that is given."""
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        rows, columns = weight.shape
        num_panels, steps = -(-rows // PANEL), -(-columns // _STEP)
        shape = (num_panels, steps, PANEL, _STEP)
        packed = cls(
            memory.empty(*shape, dtype=torch.int8)
            if memory
            else torch.empty(shape, dtype=torch.int8),
            torch.empty(num_panels, -(-columns // GROUP), PANEL, dtype=torch.int32),
            torch.empty(num_panels * PANEL, dtype=torch.float32),
            (rows, columns),
        )
        launch(
            "lpx_pack_int8",
            weight,
            weight.stride(0),
            columns,
            packed.panels,
            packed.offsets,
            packed.scales,
            rows,
            steps * _STEP,
            num_threads(weight.numel(), _GRAIN),
        )
        return packed

    def unpack(self) -> Tensor:
        """-> [N, K] bfloat16: what the integers stand for."""
        return self.rows(torch.arange(self.shape[0]))

    def rows(self, ids: Tensor) -> Tensor:
        """ids [...] int64 below N -> [..., K] bfloat16: rows of the weight, as an embedding."""
        ids = ids.contiguous()
        out = torch.empty(*ids.shape, self.shape[1], dtype=torch.bfloat16)
        launch(
            "lpx_int8_rows",
            self.panels,
            self.scales,
            ids,
            out,
            ids.numel(),
            self.panels.shape[1] * _STEP,
            self.shape[1],
            num_threads(out.numel(), _GRAIN),
        )
        return out


def linear(x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """As `naive.linear`, in native code."""
    num_columns, depth = weight.shape
    rows = x.reshape(-1, depth)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(*x.shape[:-1], num_columns, dtype=torch.bfloat16)
    launch(
        "lpx_int8_linear",
        rows,
        rows.stride(0),
        depth,
        weight.panels,
        weight.offsets,
        weight.scales,
        bias,
        out,
        rows.shape[0],
        num_columns,
        weight.panels.shape[1] * _STEP,
        num_threads(weight.panels.numel(), _GRAIN),
    )
    return out


FORMAT = LinearFormat((torch.bfloat16,), Int8Weight.pack, linear, Int8Weight.num_bytes)
