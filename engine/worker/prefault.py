"""Prefault: has the system provide KV memory before its blocks are first used."""

from loraplex.engine.kv.block_pool import BlockPool
from loraplex.engine.worker.kv_cache import BlockStorage
from loraplex.kernels.native.huge_pages import populate

PIECE = 8 << 20  # bytes: some milliseconds, for which a request that comes now may wait
AHEAD = 256 << 20  # bytes behind the last block that was ever used


class Prefault:
    """Keeps some unused blocks ready, piece by piece, while the engine is idle.

    A page of fresh memory costs its first writer a fault, which on a virtual machine can take
    longer than computing what is written.
    """

    def __init__(self, storage: BlockStorage, pool: BlockPool) -> None:
        self._storage = storage
        self._pool = pool
        self._num_warm = 0  # blocks
        self._is_on_host = storage.rows[0].device.type == "cpu"

    def prepare(self) -> bool:
        """Touches the next piece.

        Returns:
            Whether there is more to be warmed now.
        """
        size = self._storage.bytes_per_block
        target = min(self._storage.num_blocks, self._pool.num_ever_used + AHEAD // size)
        if not self._is_on_host or self._num_warm >= target:
            return False
        end = min(target, self._num_warm + max(1, PIECE // size))
        for row in self._storage.rows:
            populate(row[self._num_warm : end])
        self._num_warm = end
        return end < target
