"""What passes between the scheduler and the workers: a step as values. Torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockCopy:
    source: int
    target: int


@dataclass(frozen=True)
class BlockMoves:
    """What is swapped in one step: first out, then in, before anything else is read or written."""

    offloads: tuple[tuple[int, int], ...] = ()  # (block id, host slot)
    fetches: tuple[tuple[int, int], ...] = ()  # (host slot, block id)


NO_MOVES = BlockMoves()
