"""The Triton kernel of rotary position embeddings; `triton.py` launches it."""

import triton
import triton.language as tl


@triton.jit
def _turn(
    x,  # of one token: [heads, dim]
    out,  # of one token: [heads, dim], contiguous
    cos,  # of one token: [rotated]
    sin,
    first_head,
    num_heads,
    head_stride,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """Rounds after every operation, as plain torch does."""
    number = out.dtype.element_ty
    head = (first_head + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, HALF)[None, :]
    second = column + ROTATED // 2
    is_angle = column < ROTATED // 2
    mask = (head < num_heads) & is_angle
    x += head * head_stride
    out += head * DIM
    one = tl.load(x + column, mask=mask, other=0.0).to(tl.float32)
    two = tl.load(x + second, mask=mask, other=0.0).to(tl.float32)
    cos_one = tl.load(cos + column, mask=is_angle, other=0.0).to(tl.float32)
    cos_two = tl.load(cos + second, mask=is_angle, other=0.0).to(tl.float32)
    sin_one = tl.load(sin + column, mask=is_angle, other=0.0).to(tl.float32)
    sin_two = tl.load(sin + second, mask=is_angle, other=0.0).to(tl.float32)
    straight = (one * cos_one).to(number).to(tl.float32)
    across = (-two * sin_one).to(number).to(tl.float32)
    tl.store(out + column, (straight + across).to(number), mask=mask)
    straight = (two * cos_two).to(number).to(tl.float32)
    across = (one * sin_two).to(number).to(tl.float32)
    tl.store(out + second, (straight + across).to(number), mask=mask)
    if ROTATED < DIM:
        passed = ROTATED + tl.arange(0, REST)[None, :]
        mask = (head < num_heads) & (passed < DIM)
        tl.store(out + passed, tl.load(x + passed, mask=mask, other=0.0), mask=mask)


@triton.jit(do_not_specialize=["num_heads", "num_key_heads"])
def rotary_kernel(
    query,  # [T, H, D], the last dimension contiguous, as of all
    key,  # [T, KVH, D]
    query_out,  # [T, H, D], contiguous
    key_out,  # [T, KVH, D], contiguous
    cos,  # [T, R]
    sin,  # [T, R]
    num_heads,
    num_key_heads,
    query_token,
    query_head,
    key_token,
    key_head,
    cos_token,
    sin_token,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """A program takes some heads of one token; those of the keys come behind the queries'."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    query_tiles = tl.cdiv(num_heads, HEADS)
    cos += token * cos_token
    sin += token * sin_token
    if tile < query_tiles:
        query += token * query_token
        query_out += token * num_heads * DIM
        head = tile * HEADS
        _turn(
            query, query_out, cos, sin, head, num_heads, query_head, DIM, ROTATED, HEADS, HALF, REST
        )
    else:
        key += token * key_token
        key_out += token * num_key_heads * DIM
        head = (tile - query_tiles) * HEADS
        _turn(
            key, key_out, cos, sin, head, num_key_heads, key_head, DIM, ROTATED, HEADS, HALF, REST
        )
