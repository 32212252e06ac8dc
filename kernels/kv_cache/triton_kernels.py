"""Writes to the paged KV cache on a GPU."""

import triton
import triton.language as tl


@triton.jit
def write_cache_kernel(
    key_cache,  # [N, KVH, BS, Dk]
    value_cache,  # [N, KVH, BS, Dv]
    keys,  # [T, KVH, Dk]
    values,  # [T, KVH, Dv]
    slot_mapping,  # [T]
    key_cache_block,  # from here on: strides
    key_cache_head,
    key_cache_token,
    value_cache_block,
    value_cache_head,
    value_cache_token,
    key_token,
    key_head,
    value_token,
    value_head,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,  # numbers that a program moves
):
    """Grid: tokens, parts of SIZE numbers of all heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    place = slot % BLOCK_SIZE
    number = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    head = number // KEY_DIM
    column = number % KEY_DIM
    row = tl.load(
        keys + token * key_token + head * key_head + column, mask=head < KV_HEADS, other=0.0
    )
    at = block * key_cache_block + place * key_cache_token + head * key_cache_head + column
    tl.store(key_cache + at, row.to(key_cache.dtype.element_ty), mask=head < KV_HEADS)
    head = number // VALUE_DIM
    column = number % VALUE_DIM
    row = tl.load(
        values + token * value_token + head * value_head + column, mask=head < KV_HEADS, other=0.0
    )
    at = block * value_cache_block + place * value_cache_token + head * value_cache_head + column
    tl.store(value_cache + at, row.to(value_cache.dtype.element_ty), mask=head < KV_HEADS)


@triton.jit
def move_blocks_kernel(
    sources,  # [.., block_size] of which whole rows are read
    source_ids,  # [C], or None: the first C rows
    targets,
    target_ids,
    source_stride,
    target_stride,
    block_size,  # numbers in a block
    SIZE: tl.constexpr,
):
    """Grid: C, parts of SIZE numbers."""
    move = tl.program_id(0).to(tl.int64)
    source = move
    if source_ids is not None:
        source = tl.load(source_ids + move).to(tl.int64)
    target = move
    if target_ids is not None:
        target = tl.load(target_ids + move).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    numbers = tl.load(sources + source * source_stride + at, mask=at < block_size, other=0)
    tl.store(targets + target * target_stride + at, numbers, mask=at < block_size)
