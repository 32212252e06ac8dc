"""Tiling: how a launch of attention is cut into programs, chosen from what the host knows."""

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loraplex.kernels.attention.spans import QuerySpans

MIN_DIM = 16  # of any side of a matrix product on tensor cores

_MAX_HEADS = 32  # of a tile
_SPLIT_KEYS = 128  # so many are worth a program of their own
_MAX_SPLITS = 64
_PROCESSORS_OF_H100 = 132  # taken where no GPU is: to interpret, or to compile ahead for one


@dataclass(frozen=True)
class _Loop:
    """How a program loops over its keys."""

    keys: int
    warps: int
    stages: int
    programs: int  # per processor, up to which keys are split


# (head dim, bytes of a number) up to which a line holds: most rows of a tile, then the loops of few
# rows, which wait for memory, and of most rows, which wait for products. Between the two there is
# nothing, so that few binaries serve all batches. None spills more than a few registers
# (`benchmarks/aot_check.py`), and any GPU from sm_80 on has the shared memory.
_SIZES = {
    (64, 2): (128, _Loop(128, 4, 3, 8), _Loop(64, 8, 2, 4)),
    (128, 2): (64, _Loop(64, 4, 3, 8), _Loop(64, 4, 3, 4)),
    (256, 2): (64, _Loop(32, 4, 3, 8), _Loop(32, 8, 2, 4)),
    (64, 4): (16, _Loop(32, 4, 2, 8), _Loop(32, 4, 2, 8)),
    (128, 4): (16, _Loop(16, 4, 2, 8), _Loop(16, 4, 2, 8)),
    (256, 4): (16, _Loop(16, 4, 2, 8), _Loop(16, 4, 2, 8)),
}


@dataclass(frozen=True)
class Tiling:
    """A program takes `rows` query rows through its share of their keys, `keys` at a time."""

    rows: int  # tokens times heads, padded to a power of two
    heads: int  # query heads, all of one KV head
    keys: int  # a power of two
    warps: int
    stages: int  # tiles of keys in flight
    one_tile: bool = False  # for each sequence, known not to have more tokens
    splits: int = 1  # programs that share the keys of the same rows
    min_tiles: int = 1  # tiles of keys below which a share is not worth a program

    def parts(self, group: int) -> int:
        """Returns the programs that share the query heads of one KV head."""
        return -(-group // self.heads)

    def num_tiles(self, num_tokens: int, num_sequences: int) -> int:
        """Returns enough tiles for every way to divide the tokens among the sequences."""
        if self.one_tile:
            return num_sequences
        return num_tokens // (self.rows // self.heads) + num_sequences


def choose_tiling(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, spans: QuerySpans, window: int | None
) -> Tiling:
    """Chooses a tiling from shapes, dtypes and the bounds of the spans, so that a recorded launch
    can be replayed.

    Args:
        query: [T, H, Dk].
        key_cache: [N, KVH, BS, Dk].
        value_cache: [N, KVH, BS, Dv].
        window: as for `paged_attention`.

    Raises:
        ValueError: for heads wider than 256.
    """
    num_tokens, num_heads, key_dim = query.shape
    kv_heads = key_cache.shape[1]
    group = num_heads // kv_heads
    widest = max(key_dim, value_cache.shape[-1])
    max_rows, few, many = _sizes(widest, key_cache.element_size())
    heads = min(group, max_rows, _MAX_HEADS)
    rows = power_of_two(heads)
    one_tile = heads * spans.max_query_len <= rows
    if not one_tile:
        rows = max_rows
    loop = few if one_tile else many
    tiling = Tiling(
        rows,
        heads,
        loop.keys,
        loop.warps,
        loop.stages,
        one_tile,
        min_tiles=_SPLIT_KEYS // loop.keys,
    )
    programs = tiling.num_tiles(num_tokens, spans.num_sequences) * kv_heads * tiling.parts(group)
    keys_of_tile = spans.max_seq_len
    if window is not None:
        keys_of_tile = min(keys_of_tile, window + spans.max_query_len)
    room = loop.programs * _num_processors(query.device) // max(programs, 1)
    splits = min(room, -(-keys_of_tile // _SPLIT_KEYS), _MAX_SPLITS)
    return replace(tiling, splits=max(splits, 1))


def power_of_two(dim: int) -> int:
    """Returns the smallest power of two that holds `dim` numbers and that a matrix product
    takes."""
    return max(MIN_DIM, 1 << (dim - 1).bit_length())


def _sizes(head_dim: int, itemsize: int) -> tuple[int, _Loop, _Loop]:
    for (dim, size), sizes in _SIZES.items():
        if head_dim <= dim and itemsize <= size:
            return sizes
    raise ValueError(f"heads of {head_dim} numbers of {itemsize} bytes are too wide")


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROCESSORS_OF_H100
    return torch.cuda.get_device_properties(device).multi_processor_count
