"""Writes to the paged KV cache in native code."""

from array import array

from torch import Tensor

from loraplex.kernels.native.library import launch, num_threads

_GRAIN = 256 * 1024  # bytes worth a thread


def write_cache(
    key_cache: Tensor, value_cache: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor
) -> None:
    """As `naive.write_cache`; rows are copied as they are, so number formats must agree."""
    keys = _rows(keys.to(key_cache.dtype))
    values = _rows(values.to(value_cache.dtype))
    slots = slot_mapping.contiguous()
    num_tokens, heads = keys.shape[:2]
    key_size, value_size = key_cache.element_size(), value_cache.element_size()
    sizes = array(
        "q",
        (
            num_tokens,
            heads,
            key_cache.shape[2],
            *(size * key_size for size in (keys.shape[2], *keys.stride()[:2])),
            *(stride * key_size for stride in key_cache.stride()[:3]),
            *(size * value_size for size in (values.shape[2], *values.stride()[:2])),
            *(stride * value_size for stride in value_cache.stride()[:3]),
        ),
    )
    launch(
        "lpx_write_cache",
        key_cache,
        value_cache,
        keys,
        values,
        slots,
        sizes,
        num_threads(num_tokens * heads * keys.shape[2] * key_size, _GRAIN),
    )


def copy_blocks(storage: Tensor, sources: Tensor, targets: Tensor) -> None:
    """As `naive.copy_blocks`, of a storage whose blocks are each contiguous."""
    size = storage.element_size()
    launch(
        "lpx_copy_blocks",
        storage,
        sources,
        targets,
        len(sources),
        storage.stride(0) * size,
        storage[0].numel() * size,
    )


def _rows(tokens: Tensor) -> Tensor:
    """[T, KVH, D], with the numbers of each row side by side."""
    return tokens if tokens.stride(2) == 1 else tokens.contiguous()
