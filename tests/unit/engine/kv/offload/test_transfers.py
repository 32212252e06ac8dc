"""A step's blocks move together, out before in, and nothing else moves."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex.engine.step import NO_MOVES, BlockMoves
from loraplex.engine.worker.kv_cache import BlockStorage
from loraplex.engine.worker.transfers import HostTransfers
from loraplex.kernels.dispatch import choose_kernels

WIDTHS = (3, 5)  # of a block in two storages


class CountingStorage(BlockStorage):
    """Blocks whose every number is the block's own, and a count of what is done with them."""

    def __init__(self, num_blocks: int, offset: int) -> None:
        own = offset + torch.arange(num_blocks, dtype=torch.float32)[:, None]
        rows = [own.repeat(1, width) for width in WIDTHS]
        super().__init__(rows, choose_kernels("naive", torch.device("cpu"), torch.float32))
        self.calls: Counter[str] = Counter()

    def gather(self, ids: Tensor, out: Sequence[Tensor]) -> None:
        self.calls["gather"] += 1
        super().gather(ids, out)

    def scatter(self, ids: Tensor, blocks: Sequence[Tensor]) -> None:
        self.calls["scatter"] += 1
        super().scatter(ids, blocks)

    def content(self) -> list[float]:
        first, second = self.rows
        assert torch.equal(first[:, 0], second[:, 0])
        return first[:, 0].tolist()


def test_however_many_blocks_move_each_memory_is_read_once_and_written_once() -> None:
    device, host = CountingStorage(8, 0), CountingStorage(8, 100)
    transfers = HostTransfers(device, host)

    transfers.move(BlockMoves(((1, 4), (2, 5), (3, 6)), ((0, 6), (1, 7))))

    assert device.calls == host.calls == {"gather": 1, "scatter": 1}
    assert host.content() == [100, 101, 102, 103, 1, 2, 3, 107]
    assert device.content() == [0, 1, 2, 3, 4, 5, 100, 101]


def test_what_leaves_a_block_leaves_it_before_something_else_comes() -> None:
    device, host = CountingStorage(4, 0), CountingStorage(4, 100)

    HostTransfers(device, host).move(BlockMoves(((1, 2),), ((3, 1),)))

    assert (host.content()[2], device.content()[1]) == (1, 103)


def test_where_nothing_moves_nothing_is_touched() -> None:
    device, host = CountingStorage(4, 0), CountingStorage(4, 100)

    HostTransfers(device, host).move(NO_MOVES)

    assert device.calls == host.calls == {}
