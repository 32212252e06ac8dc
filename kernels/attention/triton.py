"""Paged attention on a GPU, for float16, bfloat16 and float32."""

import torch
from torch import Tensor

from loraplex.kernels.attention.spans import QuerySpans
from loraplex.kernels.attention.tiling import Tiling, choose_tiling, power_of_two
from loraplex.kernels.attention.triton_kernels import attention_kernel, merge_kernel

_MERGED_AT_ONCE = 16  # splits


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    spans: QuerySpans,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `naive.paged_attention`; the caches share a dtype, and their last dim is contiguous.

    Sums are float32; weights are rounded to the dtype of the values.

    Raises:
        ValueError: for heads wider than 256.
    """
    tiling = choose_tiling(query, key_cache, value_cache, spans, window)
    return attend(
        tiling, query, key_cache, value_cache, block_tables, spans, scaling, window, softcap, sinks
    )


def attend(
    tiling: Tiling,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    spans: QuerySpans,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_attention`, cut into programs as told."""
    num_tokens, num_heads, key_dim = query.shape
    _, kv_heads, block_size, value_dim = value_cache.shape
    out = query.new_empty(num_tokens, num_heads, value_dim)
    if out.numel() == 0:
        return out
    query = query if query.stride(2) == 1 else query.contiguous()
    parts, lse = out.unsqueeze(2), None
    if tiling.splits > 1:
        shape = (num_tokens, num_heads, tiling.splits)
        parts = query.new_empty(*shape, value_dim, dtype=torch.float32)
        lse = query.new_empty(shape, dtype=torch.float32)
    group = num_heads // kv_heads
    tiles = tiling.num_tiles(num_tokens, spans.num_sequences)
    grid = (tiles, kv_heads * tiling.parts(group), tiling.splits)
    attention_kernel[grid](
        query,
        key_cache,
        value_cache,
        block_tables,
        spans.query_start,
        spans.seq_lens,
        sinks,
        parts,
        lse,
        spans.num_sequences,
        scaling,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_tables.stride(0),
        *parts.stride()[:3],
        GROUP=group,
        HEADS=tiling.heads,
        KEY_DIM=key_dim,
        KEY_COLUMNS=power_of_two(key_dim),
        VALUE_DIM=value_dim,
        VALUE_COLUMNS=power_of_two(value_dim),
        BLOCK_SIZE=block_size,
        WINDOW=window,
        SOFTCAP=softcap,
        ROWS=tiling.rows,
        KEYS=tiling.keys,
        MIN_TILES=tiling.min_tiles,
        SEARCH=not tiling.one_tile,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    if lse is not None:
        merge_kernel[(num_tokens, num_heads)](
            parts,
            lse,
            out,
            tiling.splits,
            *out.stride()[:2],
            DIM=value_dim,
            COLUMNS=power_of_two(value_dim),
            CHUNK=_MERGED_AT_ONCE,
        )
    return out
