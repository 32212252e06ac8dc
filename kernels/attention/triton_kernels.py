"""Paged attention on a GPU: tiles of query rows against streams of keys, and the merge of splits.

Softmax over a stream of keys as in FlashAttention (arXiv 2205.14135). The query heads that share a
KV head lie in one tile, and keys that are split among programs are merged by the logarithms of
their sums, as in FlashDecoding and in arXiv 2511.11581. Scores carry a factor of log2(e), so that
weights are powers of two.
"""

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_sequences", "table_sequence"])
def attention_kernel(
    query,  # [T, H, Dk]
    key_cache,  # [N, KVH, BS, Dk]
    value_cache,  # [N, KVH, BS, Dv]
    block_tables,  # [S, B]
    query_start,  # [S + 1]
    seq_lens,  # [S]
    sinks,  # [H], or None
    out,  # [T, H, Dv], or [T, H, splits, Dv]
    lse,  # [T, H, splits] float32, log2 of each split's sum; None: keys are not split
    num_sequences,
    scaling,
    query_token,  # from here on: strides
    query_head,
    key_block,
    key_head,
    key_token,
    value_block,
    value_head,
    value_token,
    table_sequence,
    out_token,
    out_head,
    out_split,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEADS: tl.constexpr,  # so many of them lie in a tile
    KEY_DIM: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,  # KEY_DIM, padded to a power of two
    VALUE_DIM: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # keys that a query sees at most, or None
    SOFTCAP: tl.constexpr,  # or None
    ROWS: tl.constexpr,  # of a tile: its tokens times HEADS, padded to a power of two
    KEYS: tl.constexpr,  # of a tile
    MIN_TILES: tl.constexpr,  # tiles of keys that are worth a split
    SEARCH: tl.constexpr,  # for a sequence of several tiles, or of one
):
    """Grid: tiles of queries, KV heads * parts of a group, splits."""
    TOKENS: tl.constexpr = ROWS // HEADS
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    sequence, first = _tile(query_start, num_sequences, TOKENS, SEARCH)
    begin = tl.load(query_start + sequence)
    num_queries = (tl.load(query_start + sequence + 1) - begin).to(tl.int32)
    if first >= num_queries:
        return
    row = tl.arange(0, ROWS)
    token = first + row // HEADS
    head = (tl.program_id(1) % PARTS) * HEADS + row % HEADS
    valid = (row < TOKENS * HEADS) & (token < num_queries) & (head < GROUP)
    kv_head = tl.program_id(1) // PARTS
    head += kv_head * GROUP
    token_row = (begin + token).to(tl.int64)
    query_columns = tl.arange(0, KEY_COLUMNS)[None, :]
    query_at = token_row[:, None] * query_token + head[:, None] * query_head + query_columns
    queries = tl.load(
        query + query_at, mask=valid[:, None] & (query_columns < KEY_DIM), other=0.0
    ).to(key_cache.dtype.element_ty)

    seq_len = tl.load(seq_lens + sequence).to(tl.int32)
    position = seq_len - num_queries + token
    oldest = seq_len - num_queries + first
    start, whole, end = _key_range(oldest, TOKENS, seq_len, WINDOW, KEYS, MIN_TILES)
    keys = key_cache + kv_head.to(tl.int64) * key_head
    values = value_cache + kv_head.to(tl.int64) * value_head
    table = block_tables + sequence.to(tl.int64) * table_sequence
    peak, total = _sink(sinks, head, valid, ROWS)
    mixed = tl.zeros([ROWS, VALUE_COLUMNS], tl.float32)
    for at in tl.range(start, whole, KEYS):
        peak, total, mixed = _see(
            queries, position, peak, total, mixed, at, end, table, keys, key_block, key_token,
            values, value_block, value_token, scaling, KEY_DIM, KEY_COLUMNS, VALUE_DIM,
            VALUE_COLUMNS, BLOCK_SIZE, WINDOW, SOFTCAP, KEYS, MASKED=False,
        )  # fmt: skip
    for at in tl.range(whole, end, KEYS):
        peak, total, mixed = _see(
            queries, position, peak, total, mixed, at, end, table, keys, key_block, key_token,
            values, value_block, value_token, scaling, KEY_DIM, KEY_COLUMNS, VALUE_DIM,
            VALUE_COLUMNS, BLOCK_SIZE, WINDOW, SOFTCAP, KEYS, MASKED=True,
        )  # fmt: skip

    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    columns = tl.arange(0, VALUE_COLUMNS)[None, :]
    out_at = token_row[:, None] * out_token + head[:, None] * out_head + columns
    stored = valid[:, None] & (columns < VALUE_DIM)
    if lse is not None:
        split = tl.program_id(2)
        splits = tl.num_programs(2)
        num_heads = tl.num_programs(1) // PARTS * GROUP
        lse_at = (token_row * num_heads + head) * splits + split
        tl.store(lse + lse_at, peak + tl.log2(total), mask=valid)
        out_at += split * out_split
        stored = stored & (total > 0.0)[:, None]
    tl.store(out + out_at, mixed.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _tile(query_start, num_sequences, TOKENS: tl.constexpr, SEARCH: tl.constexpr):
    """-> the sequence of this program, and the first of its queries that lies in the tile.

    Sequence s owns the tiles from `query_start[s] // TOKENS + s` on: enough for its queries, and
    the number of all tiles follows from the numbers of rows and sequences alone. The last tile goes
    first: the later a query, the more keys it sees, and short work fills the end of a launch best.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = tile
    first = tile * 0
    if SEARCH:
        sequence = tile * 0
        beyond = sequence + num_sequences
        while beyond - sequence > 1:
            middle = (sequence + beyond) // 2
            ahead = tl.load(query_start + middle) // TOKENS + middle > tile
            sequence = tl.where(ahead, sequence, middle)
            beyond = tl.where(ahead, middle, beyond)
        own = (tl.load(query_start + sequence) // TOKENS).to(tl.int32) + sequence
        first = (tile - own) * TOKENS
    return sequence, first


@triton.jit
def _key_range(
    oldest,  # position of the first query of the tile
    TOKENS: tl.constexpr,
    seq_len,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """-> start, whole, end of this split's keys; each query sees all of `start:whole`."""
    start = oldest * 0
    if WINDOW is not None:
        start = tl.maximum(oldest - WINDOW + 1, 0)
    end = tl.minimum(oldest + TOKENS, seq_len)
    tiles = tl.cdiv(tl.maximum(end - start, 0), KEYS)
    span = tl.maximum(tl.cdiv(tiles, tl.num_programs(2)), MIN_TILES) * KEYS
    start += tl.program_id(2) * span
    end = tl.minimum(end, start + span)
    whole = start
    if WINDOW is None:
        seen = tl.maximum(tl.minimum(oldest + 1, end) - start, 0)
        whole = start + seen // KEYS * KEYS
    return start, whole, end


@triton.jit
def _sink(sinks, head, valid, ROWS: tl.constexpr):
    """-> peak, total of weights before any key: a sink takes weight, in one of the splits."""
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * _LOG2E
        here = tl.program_id(2) == 0
        peak = tl.where(here, sink, peak)
        total = tl.where(here, 1.0, total)
    return peak, total


@triton.jit
def _see(
    queries,  # [ROWS, KEY_COLUMNS]
    position,  # [ROWS]
    peak,  # [ROWS], the highest score so far
    total,  # [ROWS], sum of weights relative to it
    mixed,  # [ROWS, VALUE_COLUMNS], sum of weighted values
    at,
    end,
    table,
    keys,
    key_block,
    key_token,
    values,
    value_block,
    value_token,
    scaling,
    KEY_DIM: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,  # whether some query may not see some key
):
    """-> peak, total, mixed after the keys `at:at + KEYS`."""
    key = at + tl.arange(0, KEYS)
    if MASKED:
        block = tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0).to(tl.int64)
    else:
        block = tl.load(table + key // BLOCK_SIZE).to(tl.int64)
    slot = key % BLOCK_SIZE
    key_at = keys + block * key_block + slot * key_token
    scores = tl.dot(
        queries,
        tl.trans(_load_rows(key_at, key < end, KEY_DIM, KEY_COLUMNS, MASKED)),
        input_precision="ieee",
    )
    if SOFTCAP is None:
        scores *= scaling * _LOG2E
    else:
        scores = _tanh(scores * (scaling / SOFTCAP)) * (SOFTCAP * _LOG2E)
    if MASKED:
        visible = (key < end)[None, :] & (key[None, :] <= position[:, None])
        if WINDOW is not None:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - anchor[:, None])
    fading = tl.exp2(peak - anchor)
    value_at = values + block * value_block + slot * value_token
    tile = _load_rows(value_at, key < end, VALUE_DIM, VALUE_COLUMNS, MASKED)
    mixed = tl.dot(weights.to(tile.dtype), tile, mixed * fading[:, None], input_precision="ieee")
    return new_peak, total * fading + tl.sum(weights, 1), mixed


@triton.jit
def _load_rows(at, inside, DIM: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr):
    """-> [KEYS, COLUMNS], zero beyond DIM and outside."""
    columns = tl.arange(0, COLUMNS)[None, :]
    mask = columns < DIM
    if MASKED:
        mask = mask & inside[:, None]
    return tl.load(at[:, None] + columns, mask=mask, other=0.0)


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * _LOG2E)) + 1.0)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    parts,  # [T, H, splits, Dv] float32
    lse,  # [T, H, splits] float32
    out,  # [T, H, Dv]
    splits,
    out_token,
    out_head,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,  # splits that are read at once
):
    """Grid: tokens, heads. Parts count by the sums that their weights had."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = (token * tl.num_programs(1) + head) * splits
    columns = tl.arange(0, COLUMNS)
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    mixed = tl.zeros([COLUMNS], tl.float32)
    for start in tl.range(0, splits, CHUNK):
        split = start + tl.arange(0, CHUNK)
        sums = tl.load(lse + first + split, mask=split < splits, other=float("-inf"))
        filled = sums > float("-inf")
        part = tl.load(
            parts + (first + split)[:, None] * DIM + columns[None, :],
            mask=filled[:, None] & (columns < DIM)[None, :],
            other=0.0,
        )
        new_peak = tl.maximum(peak, tl.max(sums, 0))
        anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(sums - anchor)
        fading = tl.exp2(peak - anchor)
        mixed = mixed * fading + tl.sum(part * weights[:, None], 0)
        total = total * fading + tl.sum(weights, 0)
        peak = new_peak
    mixed = mixed / tl.where(total == 0.0, 1.0, total)
    at = out + token * out_token + head * out_head + columns
    tl.store(at, mixed.to(out.dtype.element_ty), mask=columns < DIM)
