"""Rotary position embeddings in Triton."""

import torch
import triton
from torch import Tensor

from loraplex.kernels.rotary.triton_kernels import rotary_kernel

_TILE = 1024  # numbers of a program


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `naive.rotate`; the results are views of token-major memory [T, H, D]."""
    queries, keys = _by_token(query), _by_token(key)
    num_tokens, num_heads, dim = queries.shape
    num_key_heads, rotated = keys.shape[1], cos.shape[-1]
    query_out = torch.empty(queries.shape, dtype=query.dtype, device=query.device)
    key_out = torch.empty(keys.shape, dtype=key.dtype, device=key.device)
    half = triton.next_power_of_2(rotated // 2)
    heads = max(1, min(_TILE // (2 * half), triton.next_power_of_2(num_heads)))
    tiles = triton.cdiv(num_heads, heads) + triton.cdiv(num_key_heads, heads)
    if num_tokens > 0:
        rotary_kernel[(num_tokens, tiles)](
            queries,
            keys,
            query_out,
            key_out,
            cos[0],
            sin[0],
            num_heads,
            num_key_heads,
            *queries.stride()[:2],
            *keys.stride()[:2],
            cos.stride(1),
            sin.stride(1),
            DIM=dim,
            ROTATED=rotated,
            HEADS=heads,
            HALF=half,
            REST=triton.next_power_of_2(max(dim - rotated, 1)),
            num_warps=4,
            num_stages=1,
            enable_fp_fusion=False,  # would round once where torch rounds twice
        )
    return query_out.transpose(0, 1).unsqueeze(0), key_out.transpose(0, 1).unsqueeze(0)


def _by_token(x: Tensor) -> Tensor:
    """[1, H, T, D] -> [T, H, D], with contiguous heads"""
    tokens = x[0].transpose(0, 1)
    return tokens if tokens.stride(2) == 1 else tokens.contiguous()
