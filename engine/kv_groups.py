"""KV groups: layers that need the same blocks of a sequence share one block table."""

from collections import defaultdict
from dataclasses import dataclass

MAX_PADDING = 0.10  # share of KV memory that equal group sizes may leave unused


@dataclass(frozen=True)
class KVLayer:
    """What one attention layer stores of each token."""

    index: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None  # tokens that a query sees, itself included; None: all

    def elements(self, block_size: int) -> int:
        """Numbers stored per block."""
        return self.num_kv_heads * (self.key_dim + self.value_dim) * block_size


@dataclass(frozen=True)
class KVGroup:
    layers: tuple[int, ...]
    window: int | None

    def num_passed(self, num_computed_tokens: int, block_size: int) -> int:
        """Blocks that no later query of the group sees."""
        if self.window is None:
            return 0
        return max(0, num_computed_tokens - self.window + 1) // block_size


def group_layers(layers: list[KVLayer]) -> list[KVGroup]:
    """Splits layers by window into groups of one size, full attention first.

    Groups of one size need blocks of one size, so that one pool serves them all and memory moves
    freely between full and sliding-window layers. The size is the largest whose padding is small.
    """
    by_window: dict[int | None, list[int]] = defaultdict(list)
    for layer in layers:
        by_window[layer.window].append(layer.index)
    size = _group_size([len(members) for members in by_window.values()])
    return [
        KVGroup(tuple(members[i : i + size]), window)
        for window, members in sorted(by_window.items(), key=lambda item: item[0] or 0)
        for i in range(0, len(members), size)
    ]


def group_size(groups: list[KVGroup]) -> int:
    """Layers per block: the storage that each block takes in every group."""
    return max(len(group.layers) for group in groups)


def _group_size(counts: list[int]) -> int:
    def padding(size: int) -> float:
        padded = sum(-(-count // size) * size for count in counts)
        return 1 - sum(counts) / padded

    return max(size for size in range(1, min(counts) + 1) if padding(size) <= MAX_PADDING)


def peaks(groups: list[KVGroup], block_size: int, num_tokens: int, chunk: int) -> list[int]:
    """Blocks per group that a sequence of this length holds at most while it is computed in
    chunks."""
    full = -(-num_tokens // block_size)
    return [
        full if group.window is None else min(full, _spanned(group.window + chunk - 1, block_size))
        for group in groups
    ]


def blocks_at_peak(groups: list[KVGroup], block_size: int, num_tokens: int, chunk: int) -> int:
    """Blocks that such a sequence holds at most over all groups."""
    return sum(peaks(groups, block_size, num_tokens, chunk))


def _spanned(num_tokens: int, block_size: int) -> int:
    """Blocks that this many tokens in a row touch at most, wherever they begin."""
    return -(-(num_tokens - 1) // block_size) + 1
