"""KVLayout: the layout of a sequence's tokens in blocks."""

from dataclasses import dataclass
from functools import cached_property

from loraplex.engine.kv.storage.groups import KVGroup


@dataclass(frozen=True)
class KVLayout:
    """One block of a sequence in one group holds `block_size` tokens for all layers of the group.

    Attributes:
        max_model_len: tokens of a sequence at most.
        chunk: tokens of one step at most.
    """

    groups: list[KVGroup]
    block_size: int
    max_model_len: int
    chunk: int

    @cached_property
    def max_blocks(self) -> int:
        """Returns the entries of the longest block table of a sequence in any group."""
        return max(self.num_blocks(self.max_model_len))

    def num_skipped(self, num_computed_tokens: int) -> list[int]:
        """Returns, per group, the number of leading blocks that no later query sees."""
        return [g.state.num_skipped(num_computed_tokens, self.block_size) for g in self.groups]

    def num_blocks(self, num_tokens: int) -> list[int]:
        """Returns, per group, the entries of a block table that covers so many tokens."""
        return [group.state.blocks_for(num_tokens, self.block_size) for group in self.groups]

    def peaks(self, num_tokens: int) -> list[int]:
        """Returns, per group, the most blocks that a sequence of this length holds at once."""
        return [g.state.peak(num_tokens, self.chunk, self.block_size) for g in self.groups]
