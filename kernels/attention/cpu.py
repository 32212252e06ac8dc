"""Paged attention in native code, for float32 and bfloat16."""

from array import array

import torch
from torch import Tensor

from loraplex.kernels.attention.spans import QuerySpans
from loraplex.kernels.native.library import launch, num_threads

_GRAIN = 64 * 1024  # bytes of keys and values worth a thread


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
    """As `naive.paged_attention`; the caches are float32 or bfloat16.

    Sums are float32. Where the CPU multiplies bfloat16, and against tall tiles of queries on any,
    bfloat16 weights multiply bfloat16 values.
    """
    dtype, query = query.dtype, query.to(key_cache.dtype)
    if query.stride(2) != 1:
        query = query.contiguous()
    tables = block_tables.contiguous()
    num_tokens, heads, key_dim = query.shape
    _, kv_heads, block_size, value_dim = value_cache.shape
    out = torch.empty(num_tokens, heads, value_dim, dtype=query.dtype)
    sink_logits = None if sinks is None else sinks.float().contiguous()
    sizes = array(
        "q",
        (
            spans.num_sequences,
            heads,
            kv_heads,
            block_size,
            key_dim,
            value_dim,
            *query.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            tables.stride(0),
            window or 0,
        ),
    )
    longest = spans.max_seq_len if window is None else min(spans.max_seq_len, window)
    token_bytes = kv_heads * (key_dim + value_dim) * key_cache.element_size()
    kernel = "lpx_attention_float" if query.dtype == torch.float32 else "lpx_attention_bf16"
    launch(
        kernel,
        query,
        key_cache,
        value_cache,
        out,
        tables,
        spans.query_start,
        spans.seq_lens,
        sink_logits,
        sizes,
        scaling,
        softcap or 0.0,
        num_threads(spans.num_sequences * longest * token_bytes, _GRAIN),
    )
    return out.to(dtype)
