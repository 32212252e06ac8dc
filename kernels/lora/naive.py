"""LoRA for a flat batch of mixed adapters in plain torch: the oracle of the faster kernels.

For each row t with adapter s and for each slice of the output:
    out[t, slice] += scaling * B_s (A_s x[t])
The arithmetic is float32 throughout, and one rounding to the output's dtype comes last. Rows that
no segment names are not touched.
"""

from collections.abc import Sequence

import torch

from loraplex.kernels.lora.operands import LoRAOperand

Segment = tuple[torch.Tensor, LoRAOperand]  # [n] int64 rows, and the adapter they use


def add_lora(out: torch.Tensor, x: torch.Tensor, segments: Sequence[Segment]) -> None:
    """Adds each adapter's delta of a linear to its rows, in place.

    Args:
        out: [T, width] the base linear's output, any float dtype.
        x: [T, in] its input; a view with any strides.
        segments: rows and weights per adapter; no row twice, any ranks.
    """
    for rows, operand in segments:
        hidden = x.index_select(0, rows).float() @ operand.a.float().t()  # [n, ranks]
        _expand(out, rows, hidden, operand)


def add_embedding_lora(
    out: torch.Tensor, token_ids: torch.Tensor, segments: Sequence[Segment], embed_scale: float
) -> None:
    """Adds each adapter's delta of an embedding to its rows, in place.

    Args:
        out: [T, width] the base embedding's output, any float dtype.
        token_ids: [T] integers below the vocabulary of A.
        segments: rows and weights per adapter; no row twice, any ranks.
        embed_scale: what the base embedding multiplies its rows by.
    """
    for rows, operand in segments:
        hidden = operand.a.index_select(1, token_ids.index_select(0, rows)).t().float()
        _expand(out, rows, hidden * embed_scale, operand)


def _expand(
    out: torch.Tensor, rows: torch.Tensor, hidden: torch.Tensor, operand: LoRAOperand
) -> None:
    first = 0
    for start, b, scaling in operand.slices:
        width, rank = b.shape
        delta = (hidden[:, first : first + rank] * scaling) @ b.float().t()  # [n, width]
        columns = out[:, start : start + width]
        columns[rows] = (columns[rows].float() + delta).to(out.dtype)
        first += rank
