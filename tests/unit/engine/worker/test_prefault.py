"""KV memory is warmed ahead of use, in pieces, and what is in it stays."""

import pytest
import torch

from loraplex.engine.kv.block_pool import BlockPool
from loraplex.engine.worker import prefault as module
from loraplex.engine.worker.kv_cache import BlockStorage
from loraplex.engine.worker.prefault import Prefault
from loraplex.kernels.dispatch import NAIVE

NUM_BLOCKS = 100


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> BlockStorage:
    """Pieces have 10 blocks, and 30 are to be warm behind the last one that was used."""
    storage = BlockStorage([torch.ones(NUM_BLOCKS, 64), torch.ones(NUM_BLOCKS, 32)], NAIVE)
    monkeypatch.setattr(module, "PIECE", 10 * storage.bytes_per_block)
    monkeypatch.setattr(module, "AHEAD", 30 * storage.bytes_per_block)
    return storage


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks each call warmed, told by the first tensor's pieces."""
    calls: list[int] = []
    populate = module.populate

    def note(tensor: torch.Tensor) -> None:
        populate(tensor)
        if tensor.shape[1] == 64:
            calls.append(len(tensor))

    monkeypatch.setattr(module, "populate", note)
    return calls


def test_it_stays_ahead_of_use_by_a_fixed_amount(storage: BlockStorage, warmed: list[int]) -> None:
    pool = BlockPool(NUM_BLOCKS)
    prefault = Prefault(storage, pool)
    while prefault.prepare():
        pass
    for _ in range(7):
        pool.allocate("tenant")
    while prefault.prepare():
        pass

    assert warmed == [10, 10, 10, 7]


def test_it_ends_with_the_last_block(storage: BlockStorage, warmed: list[int]) -> None:
    pool = BlockPool(NUM_BLOCKS)
    for _ in range(NUM_BLOCKS - 1):
        pool.allocate("tenant")
    prefault = Prefault(storage, pool)
    while prefault.prepare():
        pass

    assert sum(warmed) == NUM_BLOCKS


def test_what_is_in_a_block_stays(storage: BlockStorage, warmed: list[int]) -> None:
    prefault = Prefault(storage, BlockPool(NUM_BLOCKS))
    while prefault.prepare():
        pass

    assert warmed
    assert all(row.eq(1).all() for row in storage.rows)
