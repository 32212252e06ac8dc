"""Sampling helpers in Triton."""

import torch
import triton
from torch import Tensor

from loraplex.kernels.sampling.triton_kernels import argmax_kernel, greatest_part_kernel

_COLUMNS = 4096  # of a program
_WARPS = 8


def argmax(logits: Tensor) -> Tensor:
    """As `naive.argmax`, in two launches: over the parts of each row, then over their greatest."""
    num_rows, vocabulary = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    num_parts = triton.cdiv(vocabulary, _COLUMNS)
    values = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    argmax_kernel[(num_rows, num_parts)](
        logits,
        values,
        ids,
        vocabulary,
        *logits.stride(),
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
        num_stages=1,
    )
    greatest_part_kernel[(num_rows,)](
        values,
        ids,
        out,
        num_parts,
        PARTS=triton.next_power_of_2(num_parts),
        num_warps=1,
        num_stages=1,
    )
    return out
