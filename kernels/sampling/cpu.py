"""Sampling helpers in native code."""

import torch
from torch import Tensor

from loraplex.kernels.native.library import launch, num_threads

_PART = 16 * 1024  # columns that one thread looks through
_GRAIN = 64 * 1024  # numbers worth a thread


def argmax(logits: Tensor) -> Tensor:
    """As `naive.argmax`, for float32 and bfloat16 with adjacent columns."""
    num_rows, vocabulary = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64)
    parts = -(-vocabulary // _PART)
    values = torch.empty(num_rows, parts, dtype=torch.float32)
    ids = torch.empty(num_rows, parts, dtype=torch.int64)
    launch(
        "lpx_argmax_float" if logits.dtype == torch.float32 else "lpx_argmax_bf16",
        logits,
        logits.stride(0),
        num_rows,
        vocabulary,
        _PART,
        values,
        ids,
        out,
        num_threads(logits.numel(), _GRAIN),
    )
    return out
