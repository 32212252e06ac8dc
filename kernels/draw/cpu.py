"""Draws tokens from logits in native code, for float32 and bfloat16."""

import torch
from torch import Tensor

from loraplex.kernels.draw.settings import DrawSettings
from loraplex.kernels.native.library import launch


def draw(logits: Tensor, rows: Tensor, settings: DrawSettings, keys: Tensor) -> Tensor:
    """As `naive.draw`, with probabilities in float32."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens = torch.empty(rows.shape, dtype=torch.int64)
    launch(
        "lpx_draw_float" if logits.dtype == torch.float32 else "lpx_draw_bf16",
        logits,
        logits.stride(0),
        logits.shape[1],
        rows,
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.min_p,
        keys,
        tokens,
        rows.shape[0],
        torch.get_num_threads(),
    )
    return tokens
