"""OffloadCosts: decides whether fetching blocks is cheaper than computing them again."""

from loraplex.engine.kv.recompute_cost import RecomputeCost

MAX_WAIT = 2.0  # seconds that a sequence waits for the disk at most
_DISK_LATENCY = 1e-3  # seconds
_DISK_RATE = 500e6  # bytes per second, until a read was measured
_WEIGHT = 0.2  # of the newest read in the running mean


class OffloadCosts:
    """Compares measured rates: of copies at the start, of steps and of reads as they happen.

    An unmeasured rate counts as worth a copy: a copy is seldom the more expensive way.
    """

    def __init__(
        self,
        recompute: RecomputeCost,
        block_bytes: int,
        tokens_per_block: float,
        copy_rate: float,
    ) -> None:
        """Args:
        tokens_per_block: what a block of one group saves: the block size over the groups.
        copy_rate: bytes per second between device and host.
        """
        self.copy_seconds = block_bytes / copy_rate  # of one block, one way
        self._recompute = recompute
        self._block_bytes = block_bytes
        self._tokens_per_block = tokens_per_block
        self._disk_rate = _DISK_RATE

    def note_read(self, num_blocks: int, seconds: float) -> None:
        """Records the speed of a read from the disk, its time in the queue included."""
        measured = num_blocks * self._block_bytes / max(seconds, 1e-6)
        self._disk_rate += _WEIGHT * (measured - self._disk_rate)

    def is_worth_keeping(self) -> bool:
        """Returns whether copying a block to the host and back is faster than computing it."""
        return self._is_cheaper(2 * self.copy_seconds, self._tokens_per_block)

    def is_worth_writing(self) -> bool:
        """Returns whether reading a block, one of many, is faster than computing it."""
        return self._is_cheaper(self._block_bytes / self._disk_rate, self._tokens_per_block)

    def is_worth_reading(self, num_blocks: int, num_tokens: int) -> bool:
        """Returns whether reading so many blocks is faster than computing the tokens that they
        save."""
        seconds = _DISK_LATENCY + num_blocks * self._block_bytes / self._disk_rate
        return self._is_cheaper(seconds, num_tokens)

    def max_wait_s(self, num_tokens: int) -> float:
        """Returns the most seconds to wait for tokens: the time in which they can be computed. A
        wait in vain then doubles the time at worst."""
        known = self._recompute.seconds(num_tokens)
        return MAX_WAIT if known is None else min(MAX_WAIT, _DISK_LATENCY + known)

    def _is_cheaper(self, seconds: float, num_tokens: float) -> bool:
        known = self._recompute.seconds(num_tokens)
        return known is None or seconds < known
