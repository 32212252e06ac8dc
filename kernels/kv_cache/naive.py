"""Writes to the paged KV cache, in plain torch."""

from torch import Tensor


def write_cache(
    key_cache: Tensor, value_cache: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor
) -> None:
    """Scatters the keys and values of this step's tokens into their slots.

    Args:
        key_cache: [N, KVH, BS, Dk], changed in place.
        value_cache: [N, KVH, BS, Dv], changed in place.
        keys: [T, KVH, Dk].
        values: [T, KVH, Dv].
        slot_mapping: [T] int64; slot = block id * BS + offset in the block; -1: padding, skipped.
    """
    block_size, real = key_cache.shape[2], slot_mapping >= 0
    slots = slot_mapping[real]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, :, offsets] = keys[real].to(key_cache.dtype)
    value_cache[blocks, :, offsets] = values[real].to(value_cache.dtype)


def copy_blocks(storage: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copies whole blocks, as if all sources were read before any target is written.

    Args:
        storage: [N, ...], changed in place.
        sources: [C] int64 block ids; a block may be a source more than once, and a target too.
        targets: [C] int64 block ids, each but once.
    """
    storage[targets] = storage[sources]


def gather_blocks(storage: Tensor, ids: Tensor, out: Tensor) -> None:
    """Copies blocks out of the cache, one after another.

    Args:
        storage: [N, ...].
        ids: [C] int64 block ids.
        out: [C, ...] contiguous, in the dtype of `storage`; overwritten.
    """
    out.copy_(storage[ids])


def scatter_blocks(storage: Tensor, ids: Tensor, blocks: Tensor) -> None:
    """Copies blocks into the cache: the inverse of `gather_blocks`.

    Args:
        storage: [N, ...], changed in place.
        ids: [C] int64 block ids, each but once.
        blocks: [C, ...] contiguous, in the dtype of `storage`.
    """
    storage[ids] = blocks
