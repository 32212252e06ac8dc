"""OffloadCosts: whether fetching blocks is cheaper than computing them again."""

from loraplex.engine.kv.recompute_cost import RecomputeCost

MAX_WAIT = 2.0  # seconds that a sequence waits for the disk at most
_DISK_LATENCY = 1e-3  # seconds
_DISK_RATE = 500e6  # bytes per second, until a read was measured
_WEIGHT = 0.2  # of the newest read in the running mean


class OffloadCosts:
    """Compares measured rates: of copies at the start, of steps and of reads as they happen.

    What is not measured yet counts as worth a copy: a copy is seldom the dearer way.
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
        """Learns from a read, queue included, how fast the disk is."""
        measured = num_blocks * self._block_bytes / max(seconds, 1e-6)
        self._disk_rate += _WEIGHT * (measured - self._disk_rate)

    def is_worth_keeping(self) -> bool:
        """Whether a block is copied to the host and back faster than it is computed."""
        return self._is_cheaper(2 * self.copy_seconds, self._tokens_per_block)

    def is_worth_writing(self) -> bool:
        """Whether a block, one of many, is read faster than it is computed."""
        return self._is_cheaper(self._block_bytes / self._disk_rate, self._tokens_per_block)

    def is_worth_reading(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether so many blocks are read faster than the tokens that they save are computed."""
        seconds = _DISK_LATENCY + num_blocks * self._block_bytes / self._disk_rate
        return self._is_cheaper(seconds, num_tokens)

    def max_wait_s(self, num_tokens: int) -> float:
        """Seconds to wait for tokens at most: as long as they take to compute. Who waited in vain
        then needs twice the time at worst."""
        known = self._recompute.seconds(num_tokens)
        return MAX_WAIT if known is None else min(MAX_WAIT, _DISK_LATENCY + known)

    def _is_cheaper(self, seconds: float, num_tokens: float) -> bool:
        known = self._recompute.seconds(num_tokens)
        return known is None or seconds < known
