"""Rotary position embeddings in native code, for float32 and bfloat16."""

from array import array

import torch
from torch import Tensor

from loraplex.kernels.native.library import launch, num_threads

_GRAIN = 32 * 1024  # numbers worth a thread


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `naive.rotate`, to the bit. The results are views whose tokens lie one after another."""
    query, key, cos, sin = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, cos, sin)
    )
    _, heads, tokens, dim = query.shape
    kv_heads = key.shape[1]
    row = (heads + kv_heads) * dim
    out = torch.empty(tokens * row, dtype=query.dtype)
    sizes = array(
        "q",
        (
            tokens,
            heads,
            kv_heads,
            dim,
            cos.shape[2],
            query.stride(1),
            query.stride(2),
            key.stride(1),
            key.stride(2),
            cos.stride(1),
            sin.stride(1),
        ),
    )
    launch(
        "lpx_rotate_float" if query.dtype == torch.float32 else "lpx_rotate_bf16",
        query,
        key,
        cos,
        sin,
        out,
        sizes,
        num_threads(tokens * row, _GRAIN),
    )
    return (
        out.as_strided((1, heads, tokens, dim), (0, dim, row, 1)),
        out.as_strided((1, kv_heads, tokens, dim), (0, dim, row, 1), heads * dim),
    )
