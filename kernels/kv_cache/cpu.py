"""Writes to the paged KV cache in native code."""

import math
from array import array

from torch import Tensor

from loraplex.kernels.native.library import launch, num_threads

_GRAIN = 256 * 1024  # bytes worth a thread


def write_cache(
    key_cache: Tensor, value_cache: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor
) -> None:
    """As `naive.write_cache`; rows are copied as they are, so number formats must agree."""
    keys, values = _rows(keys, key_cache), _rows(values, value_cache)
    num_tokens, heads, key_dim = keys.shape
    size = key_cache.element_size()
    sizes = array(
        "q",
        (
            num_tokens,
            heads,
            key_cache.shape[2],
            size,
            *(key_dim, *keys.stride()[:2], *key_cache.stride()[:3]),
            value_cache.element_size(),
            *(values.shape[2], *values.stride()[:2], *value_cache.stride()[:3]),
        ),
    )
    launch(
        "lpx_write_cache",
        key_cache,
        value_cache,
        keys,
        values,
        slot_mapping.contiguous(),
        sizes,
        num_threads(num_tokens * heads * key_dim * size, _GRAIN),
    )


def copy_blocks(storage: Tensor, sources: Tensor, targets: Tensor) -> None:
    """As `naive.copy_blocks`, of a storage whose blocks are each contiguous."""
    _launch_on_blocks("lpx_copy_blocks", storage, sources, targets)


def gather_blocks(storage: Tensor, ids: Tensor, out: Tensor) -> None:
    """As `naive.gather_blocks`, of a storage whose blocks are each contiguous."""
    _launch_on_blocks("lpx_gather_blocks", storage, ids, out)


def scatter_blocks(storage: Tensor, ids: Tensor, blocks: Tensor) -> None:
    """As `naive.scatter_blocks`, into a storage whose blocks are each contiguous."""
    _launch_on_blocks("lpx_scatter_blocks", storage, ids, blocks)


def _launch_on_blocks(kernel: str, storage: Tensor, ids: Tensor, other: Tensor) -> None:
    size = storage.element_size()
    block_bytes = math.prod(storage.shape[1:]) * size
    launch(
        kernel,
        storage,
        ids,
        other,
        len(ids),
        storage.stride(0) * size,
        block_bytes,
        num_threads(len(ids) * block_bytes, _GRAIN),
    )


def _rows(tokens: Tensor, cache: Tensor) -> Tensor:
    """[T, KVH, D] in the dtype of the cache, with the numbers of each row side by side."""
    if tokens.dtype != cache.dtype:
        tokens = tokens.to(cache.dtype)
    return tokens if tokens.stride(2) == 1 else tokens.contiguous()
