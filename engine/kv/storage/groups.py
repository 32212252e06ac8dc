"""KV groups: layers that need the same blocks of a sequence share one block table."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from loraplex.engine.kv.storage.layer_state import LayerState

MAX_PADDING = 0.10  # share of KV memory that equal group sizes may leave unused
MIN_GAIN = 0.1  # share of the layers that adapters must share in addition to be worth more groups
GOOD_ENOUGH = 0.9  # of what the best size shares


@dataclass(frozen=True)
class KVLayer:
    """What one attention layer stores: so many numbers for each token."""

    index: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    state: LayerState  # which tokens


@dataclass(frozen=True)
class KVGroup:
    layers: tuple[int, ...]
    state: LayerState


def group_layers(layers: list[KVLayer], size: int | None = None) -> list[KVGroup]:
    """Splits layers by what they store, from the lowest up, into groups of one size, full attention
    first.

    Groups of one size need blocks of one size, so that one pool serves them all and memory moves
    freely between full and sliding-window layers.

    Args:
        size: layers of a group; None: as many as leave little padding.
    """
    by_state = _by_state(layers)
    if size is None:
        size = max(_sizes(by_state))
    return [
        KVGroup(tuple(members[i : i + size]), state)
        for state, members in sorted(by_state.items(), key=lambda item: item[0].window or 0)
        for i in range(0, len(members), size)
    ]


def choose_group_size(layers: list[KVLayer], frontiers: Iterable[int]) -> int:
    """Chooses the group size that lets adapters share the layers below their frontiers.

    A group is shared where all its layers are below. Smaller groups share more, but each costs a
    block table; so groups stay as large as possible unless a smaller size lets `MIN_GAIN` more of
    all layers be shared, on average over the adapters.

    Args:
        frontiers: per adapter, how many of the lowest layers store what the base model does.
    """
    partial = [frontier for frontier in frontiers if frontier <= max(la.index for la in layers)]
    sizes = sorted(_sizes(_by_state(layers)), reverse=True)
    if not partial:
        return sizes[0]
    shared = {size: _mean_shared(group_layers(layers, size), partial) for size in sizes}
    needed = shared[sizes[0]] + MIN_GAIN * len(layers)
    gains = [size for size in sizes if shared[size] >= needed]
    return next((s for s in gains if shared[s] >= GOOD_ENOUGH * max(shared.values())), sizes[0])


def group_size(groups: list[KVGroup]) -> int:
    """Returns the layers per block: the storage that each block takes in every group."""
    return max(len(group.layers) for group in groups)


def _by_state(layers: list[KVLayer]) -> dict[LayerState, list[int]]:
    by_state: dict[LayerState, list[int]] = defaultdict(list)
    for layer in sorted(layers, key=lambda layer: layer.index):
        by_state[layer.state].append(layer.index)
    return by_state


def _sizes(by_state: dict[LayerState, list[int]]) -> list[int]:
    """Returns the group sizes that leave little padding."""
    counts = [len(members) for members in by_state.values()]

    def padding(size: int) -> float:
        padded = sum(-(-count // size) * size for count in counts)
        return 1 - sum(counts) / padded

    return [size for size in range(1, min(counts) + 1) if padding(size) <= MAX_PADDING]


def _mean_shared(groups: list[KVGroup], frontiers: list[int]) -> float:
    """Returns how many layers an adapter shares with the base model, on average."""
    shared = sum(
        len(group.layers)
        for frontier in frontiers
        for group in groups
        if max(group.layers) < frontier
    )
    return shared / len(frontiers)


def blocks_at_peak(groups: list[KVGroup], block_size: int, num_tokens: int, chunk: int) -> int:
    """Returns the most blocks that a sequence of this length holds at once, over all groups."""
    return sum(group.state.peak(num_tokens, chunk, block_size) for group in groups)
