"""Writes to the paged KV cache on a GPU."""

from torch import Tensor

from loraplex.kernels.kv_cache.triton_kernels import move_blocks_kernel, write_cache_kernel

_WRITTEN = 1024  # numbers that a program writes of one token
_MOVED = 2048  # numbers that a program moves of one block


def write_cache(
    key_cache: Tensor, value_cache: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor
) -> None:
    """As `naive.write_cache`; the last dim of the caches is contiguous."""
    num_tokens, kv_heads, key_dim = keys.shape
    value_dim = values.shape[2]
    keys, values = _rows(keys), _rows(values)
    if num_tokens == 0:
        return
    parts = -(-kv_heads * max(key_dim, value_dim) // _WRITTEN)
    write_cache_kernel[(num_tokens, parts)](
        key_cache,
        value_cache,
        keys,
        values,
        slot_mapping.contiguous(),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *keys.stride()[:2],
        *values.stride()[:2],
        KV_HEADS=kv_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=key_cache.shape[2],
        SIZE=_WRITTEN,
    )


def copy_blocks(storage: Tensor, sources: Tensor, targets: Tensor) -> None:
    """As `naive.copy_blocks`, of a storage whose blocks are each contiguous."""
    aside = storage.new_empty(len(sources), *storage.shape[1:])  # copies may cross
    _move(storage, sources, aside, None)
    _move(aside, None, storage, targets)


def gather_blocks(storage: Tensor, ids: Tensor, out: Tensor) -> None:
    """As `naive.gather_blocks`, of a storage whose blocks are each contiguous."""
    _move(storage, ids, out, None)


def scatter_blocks(storage: Tensor, ids: Tensor, blocks: Tensor) -> None:
    """As `naive.scatter_blocks`, of a storage whose blocks are each contiguous."""
    _move(blocks, None, storage, ids)


def _move(
    sources: Tensor, source_ids: Tensor | None, targets: Tensor, target_ids: Tensor | None
) -> None:
    ids = source_ids if source_ids is not None else target_ids
    block_size = sources[:1].numel()
    if ids is None or len(ids) == 0 or block_size == 0:
        return
    move_blocks_kernel[(len(ids), -(-block_size // _MOVED))](
        sources,
        source_ids,
        targets,
        target_ids,
        sources.stride(0),
        targets.stride(0),
        block_size,
        SIZE=_MOVED,
    )


def _rows(tokens: Tensor) -> Tensor:
    """[T, KVH, D], with the numbers of each row side by side."""
    return tokens if tokens.stride(2) == 1 else tokens.contiguous()
