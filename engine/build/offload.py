"""Builds the lower tiers of one engine, as configured."""

import hashlib
import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import ConfigRefused
from loraplex.engine.kv.keys import BlockKeyScope
from loraplex.engine.kv.metering import Metering
from loraplex.engine.kv.offload.costs import OffloadCosts
from loraplex.engine.kv.offload.disk_tier import DiskTier
from loraplex.engine.kv.offload.manager import OffloadManager
from loraplex.engine.kv.offload.segment import OffloadIdentity
from loraplex.engine.kv.recompute_cost import RecomputeCost
from loraplex.engine.kv.storage.layout import KVLayout
from loraplex.engine.kv.tiers import LowerTiers, Transfers
from loraplex.engine.step import BlockMoves
from loraplex.engine.worker.host_arena import HostArena
from loraplex.engine.worker.kv_cache import BlockStorage, KVCache
from loraplex.engine.worker.kv_memory import free_memory
from loraplex.engine.worker.transfers import CudaTransfers, HostTransfers

CUDA_BYTES = 1 << 30  # of host memory by default
DISK_BYTES = 256 << 20  # the same, on a CPU, where only the disk needs it
FREE_SHARE = 0.25  # of what a default KV cache would leave free: never more by default
_MEASURED = 256  # blocks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Offload:
    tiers: LowerTiers
    transfers: Transfers | None = None  # that move the blocks; None where nothing is offloaded


def build_offload(
    config: EngineConfig,
    layout: KVLayout,
    scope: BlockKeyScope,
    cache: KVCache,
    recompute: RecomputeCost,
    metering: Metering,
) -> Offload:
    """Builds the configured tiers below the blocks of `cache`, none of which is in use yet.

    Raises:
        ConfigRefused: the host memory that was asked for is not to be had.
    """
    device = cache.storage
    num_slots = _host_bytes(config, device.device) // device.bytes_per_block
    arena = _arena(config, device, num_slots) if num_slots else None
    if arena is None:
        return Offload(LowerTiers())
    kind = CudaTransfers if device.device.type == "cuda" else HostTransfers
    transfers = kind(device, arena.storage)
    rate = _copy_rate(transfers, device, num_slots)
    tokens_per_block = layout.block_size / len(layout.groups)
    costs = OffloadCosts(recompute, device.bytes_per_block, tokens_per_block, rate)
    disk = None
    if config.offload_disk:
        folder = Path(config.adapter_store).parent / "offload"
        disk = DiskTier(folder, config.offload_disk, _identity(layout, scope, device))
    return Offload(OffloadManager(transfers, arena, costs, metering, disk=disk), transfers)


def _arena(config: EngineConfig, device: BlockStorage, num_slots: int) -> HostArena | None:
    """Allocates host memory for so many blocks; None where there is none and none was asked for."""
    dtype, on_cuda = device.rows[0].dtype, device.device.type == "cuda"
    try:
        return HostArena(num_slots, device.widths, dtype, pinned=on_cuda)
    except (RuntimeError, OSError) as error:  # CUDA refuses with the one, mmap with the other
        reason = f"no {num_slots * device.bytes_per_block:,} bytes of host memory: {error}"
        if config.offload_memory is not None:
            raise ConfigRefused(f"offload_memory: {reason}") from error
        logger.warning("KV blocks are not offloaded: %s", reason)
        return None


def _host_bytes(config: EngineConfig, device: torch.device) -> int:
    if config.offload_memory is not None:
        return config.offload_memory
    usual = CUDA_BYTES if device.type == "cuda" else DISK_BYTES if config.offload_disk else 0
    return min(usual, int(FREE_SHARE * free_memory(torch.device("cpu"))))


def _identity(layout: KVLayout, scope: BlockKeyScope, device: BlockStorage) -> OffloadIdentity:
    places = repr(layout.groups) + repr(device.widths)
    return OffloadIdentity(
        kv_format=scope.kv_format,
        model_revision=scope.model_revision,
        quantization=scope.quantization,
        numerics=scope.numerics,
        layout=hashlib.sha256(places.encode()).hexdigest(),
        block_size=layout.block_size,
        block_bytes=device.bytes_per_block,
    )


def _copy_rate(transfers: Transfers, device: BlockStorage, num_slots: int) -> float:
    """Returns the bytes per second from the device to the host: the best of three copies. No block
    is in use yet."""
    count = min(_MEASURED, device.num_blocks - 1, num_slots)
    moves = BlockMoves(offloads=tuple((1 + index, index) for index in range(count)))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        transfers.move(moves)
        transfers.finish()
        times.append(time.perf_counter() - start)
    return count * device.bytes_per_block / max(min(times), 1e-9)
