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
    """Copies whole blocks, for copy-on-write.

    Args:
        storage: [N, ...], changed in place.
        sources: [C] int64 block ids.
        targets: [C] int64 block ids, none of which is a source.
    """
    storage[targets] = storage[sources]


def gather_blocks(storage: Tensor, ids: Tensor, out: Tensor) -> None:
    """Collects whole blocks, to swap them out.

    Args:
        storage: [N, ...].
        ids: [C] int64 block ids.
        out: [C, ...], contiguous, changed in place.
    """
    out.copy_(storage[ids])


def scatter_blocks(storage: Tensor, ids: Tensor, blocks: Tensor) -> None:
    """Puts whole blocks back, to swap them in.

    Args:
        storage: [N, ...], changed in place.
        ids: [C] int64 block ids, each once.
        blocks: [C, ...], contiguous.
    """
    storage[ids] = blocks
