"""Paged attention in plain torch: the oracle that faster implementations are tested against."""

import torch
from torch import Tensor

from loraplex.kernels.attention.spans import QuerySpans


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
    """Attends each query token to its sequence's cached keys, itself included.

    Prefill, chunked prefill and decode are one case: the query rows of a sequence are the last of
    its cached tokens.

    Args:
        query: [T, H, Dk], any float dtype.
        key_cache: [N, KVH, BS, Dk], keys by block; H is a multiple of KVH.
        value_cache: [N, KVH, BS, Dv].
        block_tables: [S, B] integer; entries behind the window are never read.
        spans: the rows and the length of each of the S sequences.
        scaling: multiplies the scores.
        window: a query sees at most this many keys, itself included.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: [H] extra logits that take weight and give no value.

    Returns:
        [T, H, Dv] in the dtype of `query`; computed in float32.
    """
    out = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[-1])
    query_start, seq_lens = spans.query_start.tolist(), spans.seq_lens.tolist()
    for s, seq_len in enumerate(seq_lens):
        rows = slice(query_start[s], query_start[s + 1])
        num_queries = rows.stop - rows.start
        if seq_len == 0:
            out[rows] = 0
        if num_queries == 0 or seq_len == 0:
            continue
        first = _first_visible_block(seq_len - num_queries, window, key_cache.shape[2])
        keys = _gather(key_cache, block_tables[s], first, seq_len)
        values = _gather(value_cache, block_tables[s], first, seq_len)
        first_position = first * key_cache.shape[2]
        mask = _visible(num_queries, seq_len, first_position, window, query.device)
        out[rows] = _attend(query[rows], keys, values, mask, scaling, softcap, sinks)
    return out


def _first_visible_block(first_query: int, window: int | None, block_size: int) -> int:
    return 0 if window is None else max(0, first_query - window + 1) // block_size


def _gather(cache: Tensor, table: Tensor, first: int, seq_len: int) -> Tensor:
    """-> [KVH, L, D] float32: the tokens of a sequence from block `first` on."""
    block_size = cache.shape[2]
    blocks = cache.index_select(0, table[first : -(-seq_len // block_size)])  # [B, KVH, BS, D]
    tokens = blocks.transpose(0, 1).flatten(1, 2)
    return tokens[:, : seq_len - first * block_size].float()


def _visible(
    num_queries: int, seq_len: int, first_position: int, window: int | None, device: torch.device
) -> Tensor:
    """-> [Q, L] bool: which key each query may see."""
    queries = torch.arange(seq_len - num_queries, seq_len, device=device)[:, None]
    keys = torch.arange(first_position, seq_len, device=device)[None, :]
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """query [Q, H, Dk], keys [KVH, L, Dk], values [KVH, L, Dv], mask [Q, L] -> [Q, H, Dv]."""
    num_queries, num_heads, _ = query.shape
    grouped = query.float().transpose(0, 1).reshape(keys.shape[0], -1, query.shape[2])
    scores = (grouped @ keys.transpose(1, 2)) * scaling  # [KVH, H / KVH * Q, L]
    scores = scores.view(num_heads, num_queries, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(-1, 1, 1).expand(-1, num_queries, 1)
        weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    mixed = weights.reshape(keys.shape[0], -1, weights.shape[-1]) @ values
    return mixed.view(num_heads, num_queries, -1).transpose(0, 1).to(query.dtype)
