"""LayerState: what a layer stores of a sequence, and which part of it is still needed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias


@dataclass(frozen=True)
class FullAttention:
    """Keys and values of every token, for every later query."""

    window: ClassVar[None] = None  # a query sees all

    def num_skipped(self, num_computed_tokens: int, block_size: int) -> int:
        """Returns the number of leading blocks that no later query sees."""
        return 0

    def blocks_for(self, num_tokens: int, block_size: int) -> int:
        """Returns the entries of a block table for so many tokens, skipped ones included."""
        return -(-num_tokens // block_size)

    def peak(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Returns the most blocks that a sequence of this length holds at once while it is computed
        at most `chunk` tokens at a time."""
        return self.blocks_for(num_tokens, block_size)

    def usable_prefix(self, has: Callable[[int], bool], limit: int, block_size: int) -> int:
        """Returns the most blocks, up to a limit, behind which a sequence can continue from a
        cache.

        Args:
            has: whether the cache has the block at an index below the limit.
        """
        return next((index for index in range(limit) if not has(index)), limit)

    def copies_on_fork(self, num_tokens: int, block_size: int) -> bool:
        """Returns whether the token after so many is written into a block that forks share."""
        return num_tokens % block_size != 0


@dataclass(frozen=True)
class SlidingWindow:
    """Keys and values of the tokens that later queries still see: the last `window`."""

    window: int  # tokens that a query sees, itself included

    def num_skipped(self, num_computed_tokens: int, block_size: int) -> int:
        """As `FullAttention.num_skipped`."""
        return max(0, num_computed_tokens - self.window + 1) // block_size

    def blocks_for(self, num_tokens: int, block_size: int) -> int:
        """As `FullAttention.blocks_for`."""
        return -(-num_tokens // block_size)

    def peak(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """As `FullAttention.peak`: the most blocks that the window and a chunk touch, wherever they
        begin."""
        in_a_row = self.window + chunk - 1
        touched = -(-(in_a_row - 1) // block_size) + 1
        return min(self.blocks_for(num_tokens, block_size), touched)

    def usable_prefix(self, has: Callable[[int], bool], limit: int, block_size: int) -> int:
        """As `FullAttention.usable_prefix`: only what the window shows must be cached.

        A gap lies in the window of each larger number, so the search continues at the gap itself.
        """
        num_blocks = limit
        while True:
            visible = range(self.num_skipped(num_blocks * block_size, block_size), num_blocks)
            gap = next((index for index in visible if not has(index)), None)
            if gap is None:
                return num_blocks
            num_blocks = gap

    def copies_on_fork(self, num_tokens: int, block_size: int) -> bool:
        """As `FullAttention.copies_on_fork`."""
        return num_tokens % block_size != 0


LayerState: TypeAlias = FullAttention | SlidingWindow


def attention_state(window: int | None) -> LayerState:
    """Returns what an attention layer stores; `window`: tokens that a query sees, None: all."""
    return FullAttention() if window is None else SlidingWindow(window)
