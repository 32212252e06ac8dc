"""A bfloat16 linear layer over packed weights: few rows at the speed of memory."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.kernels.native.library import native, num_threads

PANEL = 32  # output columns that lie together
_GRAIN = 64 * 1024  # bytes of weights worth a thread


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] in the order in which the kernel reads it, padded with zeros."""

    panels: Tensor  # [ceil(N / 32), ceil(K / 2), 32, 2] bfloat16, contiguous
    shape: tuple[int, int]  # N, K

    @classmethod
    def pack(cls, weight: Tensor) -> "PackedWeight":
        """Packs a weight [N, K] in bfloat16."""
        rows, columns = weight.shape
        num_panels, steps = -(-rows // PANEL), -(-columns // 2)
        panels = torch.empty(num_panels, steps, PANEL, 2, dtype=torch.bfloat16)
        whole = rows // PANEL if columns % 2 == 0 else 0
        body = weight[: whole * PANEL].reshape(whole, PANEL, steps, 2) if whole else None
        if body is not None:
            panels[:whole] = body.transpose(1, 2)
        if whole < num_panels:
            rest = weight.new_zeros((num_panels - whole) * PANEL, steps * 2)
            rest[: rows - whole * PANEL, :columns] = weight[whole * PANEL :]
            panels[whole:] = rest.view(-1, PANEL, steps, 2).transpose(1, 2)
        return cls(panels, (rows, columns))

    def unpack(self) -> Tensor:
        """-> [N, K] bfloat16, a copy."""
        num_panels, steps = self.panels.shape[:2]
        whole = self.panels.transpose(1, 2).reshape(num_panels * PANEL, steps * 2)
        return whole[: self.shape[0], : self.shape[1]].contiguous()

    def rows(self, ids: Tensor) -> Tensor:
        """ids [...] int64 below N -> [..., K] bfloat16: rows of the weight, as an embedding."""
        ids = ids.contiguous()
        steps, columns = self.panels.shape[1], self.shape[1]
        out = torch.empty(*ids.shape, columns, dtype=torch.bfloat16)
        native().lpx_packed_rows_bf16(
            self.panels.data_ptr(),
            ids.data_ptr(),
            out.data_ptr(),
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
    rows = x.reshape(-1, depth)
    if padded != depth:
        rows = torch.nn.functional.pad(rows, (0, 1))
    elif rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(*x.shape[:-1], num_columns, dtype=torch.bfloat16)
    native().lpx_linear_bf16(
        rows.data_ptr(),
        weight.panels.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows.shape[0],
        num_columns,
        padded,
        rows.stride(0),
        num_columns,
        num_threads(weight.panels.numel() * 2, _GRAIN),
    )
    return out
