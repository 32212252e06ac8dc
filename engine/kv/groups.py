"""KV groups: layers that need the same blocks of a sequence share one block table."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

MAX_PADDING = 0.10  # share of KV memory that equal group sizes may leave unused
MIN_GAIN = 0.1  # share of the layers that adapters must share in addition to be worth more groups
GOOD_ENOUGH = 0.9  # of what the best size shares


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


def group_layers(layers: list[KVLayer], size: int | None = None) -> list[KVGroup]:
    """Splits layers by window, and from the lowest up, into groups of one size, full attention
    first.

    Groups of one size need blocks of one size, so that one pool serves them all and memory moves
    freely between full and sliding-window layers.

    Args:
        size: layers of a group; None: as many as leave little padding.
    """
    by_window = _by_window(layers)
    if size is None:
        size = max(_sizes(by_window))
    return [
        KVGroup(tuple(members[i : i + size]), window)
        for window, members in sorted(by_window.items(), key=lambda item: item[0] or 0)
        for i in range(0, len(members), size)
    ]


def choose_group_size(layers: list[KVLayer], frontiers: Iterable[int]) -> int:
    """The size of groups that lets adapters share the layers below their frontiers.

    A group is shared where all its layers are below. Smaller groups share more, but each costs a
    block table; so they stay as large as can be unless a smaller size lets `MIN_GAIN` of all layers
    more be shared, on average over the adapters.

    Args:
        frontiers: per adapter, how many of the lowest layers store what the base model does.
    """
    partial = [frontier for frontier in frontiers if frontier <= max(la.index for la in layers)]
    sizes = sorted(_sizes(_by_window(layers)), reverse=True)
    if not partial:
        return sizes[0]
    shared = {size: _mean_shared(group_layers(layers, size), partial) for size in sizes}
    needed = shared[sizes[0]] + MIN_GAIN * len(layers)
    gains = [size for size in sizes if shared[size] >= needed]
    return next((s for s in gains if shared[s] >= GOOD_ENOUGH * max(shared.values())), sizes[0])


def group_size(groups: list[KVGroup]) -> int:
    """Layers per block: the storage that each block takes in every group."""
    return max(len(group.layers) for group in groups)


def _by_window(layers: list[KVLayer]) -> dict[int | None, list[int]]:
    by_window: dict[int | None, list[int]] = defaultdict(list)
    for layer in sorted(layers, key=lambda layer: layer.index):
        by_window[layer.window].append(layer.index)
    return by_window


def _sizes(by_window: dict[int | None, list[int]]) -> list[int]:
    """Sizes of groups that leave little padding."""
    counts = [len(members) for members in by_window.values()]

    def padding(size: int) -> float:
        padded = sum(-(-count // size) * size for count in counts)
        return 1 - sum(counts) / padded

    return [size for size in range(1, min(counts) + 1) if padding(size) <= MAX_PADDING]


def _mean_shared(groups: list[KVGroup], frontiers: list[int]) -> float:
    """Layers that an adapter shares with the base model, on average."""
    shared = sum(
        len(group.layers)
        for frontier in frontiers
        for group in groups
        if max(group.layers) < frontier
    )
    return shared / len(frontiers)


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
