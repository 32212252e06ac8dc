"""A scheduler at work above host memory and a disk: real tiers, and a toy model's numbers."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from support.engine.kv import MAX_MODEL_LEN, SCOPE
from support.engine.scheduling import SchedulerHarness, Setup
from support.models.toy_model import ToyModel, toy_cells

from loraplex.engine.kv.block_pool import BlockPool
from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.kv.metering import Metering
from loraplex.engine.kv.offload.costs import OffloadCosts
from loraplex.engine.kv.offload.disk_tier import DiskTier
from loraplex.engine.kv.offload.manager import OffloadManager
from loraplex.engine.kv.offload.segment import OffloadIdentity
from loraplex.engine.kv.recompute_cost import RecomputeCost
from loraplex.engine.kv.storage.layout import KVLayout
from loraplex.engine.worker.host_arena import HostArena
from loraplex.engine.worker.kv_cache import BlockStorage
from loraplex.engine.worker.transfers import HostTransfers
from loraplex.kernels.dispatch import NAIVE


class OffloadingHarness(SchedulerHarness):
    """Offloads whatever is evicted: nothing is measured, so each copy counts as worth it."""

    def __init__(
        self,
        setup: Setup | None = None,
        *,
        num_host_slots: int = 200,
        folder: Path | None = None,
        disk_bytes: int = 1 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folder`: of the disk tier; None: there is none."""
        setup = setup or Setup()
        size, self.recompute, metering = setup.block_size, RecomputeCost(), Metering()
        cells = toy_cells(setup.num_blocks + 1, size)
        device = BlockStorage([torch.from_numpy(cells)], NAIVE)
        arena = HostArena(num_host_slots, device.widths, torch.int64, pinned=False)
        self.transfers = HostTransfers(device, arena.storage)
        identity = OffloadIdentity(
            kv_format="toy",
            model_revision="1",
            quantization="none",
            numerics="1",
            layout="toy",
            block_size=size,
            block_bytes=device.bytes_per_block,
        )
        self.offload = OffloadManager(
            self.transfers,
            arena,
            OffloadCosts(self.recompute, device.bytes_per_block, size, copy_rate=1e9),
            metering,
            disk=None if folder is None else DiskTier(folder, disk_bytes, identity, clock),
            clock=clock,
        )
        pool = BlockPool(setup.num_blocks + 1, metering=metering, on_evict=self.offload.offload)
        layout = KVLayout(setup.groups, size, MAX_MODEL_LEN, setup.max_num_batched_tokens)
        super().__init__(setup, kv=KVCacheManager(pool, layout, SCOPE, self.offload))
        assert isinstance(self.model, ToyModel)
        self.model.offload(cells, self.transfers)

    def close(self) -> None:
        self.offload.close()

    def settle(self) -> None:
        """Lets what was evicted arrive below, as a step would."""
        self.transfers.move(self.offload.take_moves())
        self.offload.begin_step()

    def flush_device(self) -> None:
        """Evicts all that is cached on the device, and lets it arrive below."""
        self.take_memory()
        self.give_memory_back()
        self.settle()

    def flush_host(self) -> None:
        """Evicts what the usual tenant has in host memory, and lets it be written."""
        tier, disk = self.offload.host, self.offload.disk
        assert disk is not None
        fillers = [tier.reserve((9, bytes([i])), (), "tenant") for i in range(tier.num_slots)]
        for filler in fillers:
            if filler is not None:
                tier.discard(filler)
        disk.flush()
