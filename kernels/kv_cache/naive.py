"""Writes to the paged KV cache, in plain torch."""

from torch import Tensor


def write_cache(cache: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
    """Scatters the keys or values of this step's tokens into their slots.

    Args:
        cache: [N, KVH, BS, D], changed in place.
        values: [T, KVH, D].
        slot_mapping: [T] int64; slot = block id * BS + offset in the block.
    """
    block_size = cache.shape[2]
    cache[slot_mapping // block_size, :, slot_mapping % block_size] = values.to(cache.dtype)


def copy_blocks(storage: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copies whole blocks, for copy-on-write.

    Args:
        storage: [N, ...], changed in place.
        sources: [C] int64 block ids.
        targets: [C] int64 block ids, none of which is a source.
    """
    storage[targets] = storage[sources]
