"""CudaTransfers on host tensors and streams without work: what moves, through how much memory."""

import pytest
import torch
from support.kernels.fake_cuda import FakeRuntime, fake_runtime

from loraplex.engine.step import BlockMoves
from loraplex.engine.worker.host_arena import HostArena
from loraplex.engine.worker.kv_cache import BlockStorage
from loraplex.engine.worker.transfers import CudaTransfers
from loraplex.kernels.dispatch import NAIVE

WIDTHS = [5, 12]
BLOCK_BYTES = sum(WIDTHS) * 4


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    return fake_runtime(monkeypatch)


@pytest.fixture
def device() -> BlockStorage:
    rows = [torch.arange(20 * width, dtype=torch.float32).view(20, width) for width in WIDTHS]
    return BlockStorage(rows, NAIVE)


def transfers_over(device: BlockStorage, staged_blocks: int) -> CudaTransfers:
    arena = HostArena(10, WIDTHS, torch.float32, pinned=True)
    return CudaTransfers(device, arena.storage, staged_blocks * BLOCK_BYTES)


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("staged_blocks", [1, 3, 7, 100])
def test_blocks_come_back_whatever_part_of_them_is_staged_at_once(
    device: BlockStorage, staged_blocks: int
) -> None:
    transfers = transfers_over(device, staged_blocks)
    before = device.read(range(1, 8))

    transfers.move(BlockMoves(offloads=tuple((1 + i, 9 - i) for i in range(7))))
    for row in device.rows:
        row[1:8] = torch.nan
    transfers.finish()
    transfers.move(BlockMoves(fetches=tuple((9 - i, 11 + i) for i in range(7))))

    assert device.read(range(11, 18)) == before


def test_many_blocks_take_no_more_memory_than_few(
    runtime: FakeRuntime, device: BlockStorage
) -> None:
    transfers = transfers_over(device, staged_blocks=3)
    before = dict(runtime.pinned)

    transfers.move(BlockMoves(offloads=tuple((1 + i, i) for i in range(10))))
    transfers.finish()

    assert runtime.pinned == before
    assert sorted(before.values()) == [3 * BLOCK_BYTES, 3 * BLOCK_BYTES, 10 * BLOCK_BYTES]
