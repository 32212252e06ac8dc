"""The lower tiers of one engine, as it is configured."""

import hashlib
import logging
import time
from pathlib import Path

import torch

from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import ConfigRefused
from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.kv.offload.costs import SwapCosts
from loraplex.engine.kv.offload.disk_tier import DiskTier
from loraplex.engine.kv.offload.manager import SwapManager
from loraplex.engine.kv.offload.segment import SwapIdentity
from loraplex.engine.kv.recompute_cost import RecomputeCost
from loraplex.engine.kv.tiers import Transfers
from loraplex.engine.model.loader import LoadedModel
from loraplex.engine.step import BlockMoves
from loraplex.engine.worker.host_arena import HostArena
from loraplex.engine.worker.kv_cache import BlockStorage, kv_format_of
from loraplex.engine.worker.kv_memory import free_memory
from loraplex.engine.worker.transfers import CudaTransfers, HostTransfers

CUDA_BYTES = 1 << 30  # of host memory by default
DISK_BYTES = 256 << 20  # the same, on a CPU, where only the disk needs it
FREE_SHARE = 0.25  # of what a default KV cache would leave free: never more by default
_MEASURED = 256  # blocks

logger = logging.getLogger(__name__)


def add_lower_tiers(
    config: EngineConfig,
    loaded: LoadedModel,
    kv: KVCacheManager,
    device: BlockStorage,
    recompute: RecomputeCost,
) -> Transfers | None:
    """Puts the configured tiers below the KV manager's blocks, whose memory is `device`.

    Returns:
        what moves the blocks, or None where nothing is swapped.

    Raises:
        ConfigRefused: the host memory that was asked for is not to be had.
    """
    num_slots = _host_bytes(config, loaded.device) // device.bytes_per_block
    if num_slots == 0:
        return None
    on_cuda = loaded.device.type == "cuda"
    try:
        arena = HostArena(num_slots, device.widths, loaded.dtype, pinned=on_cuda)
        transfers = (CudaTransfers if on_cuda else HostTransfers)(device, arena.storage)
    except (RuntimeError, OSError) as error:  # torch refuses with the one, the system with both
        reason = f"no {num_slots * device.bytes_per_block:,} bytes of host memory: {error}"
        if config.swap_memory is not None:
            raise ConfigRefused(f"swap_memory: {reason}") from error
        logger.warning("nothing is swapped: %s", reason)
        return None
    rate = _copy_rate(transfers, device, num_slots)
    tokens_per_block = kv.block_size / len(kv.groups)
    costs = SwapCosts(recompute, device.bytes_per_block, tokens_per_block, rate)
    disk = None
    if config.swap_disk:
        folder = Path(config.adapter_store).parent / "swap"
        disk = DiskTier(folder, config.swap_disk, _identity(config, loaded, kv, device))
    kv.tiers = swap = SwapManager(transfers, arena, costs, kv.pool.metering, disk=disk)
    kv.pool.on_evict = swap.keep
    return transfers


def _host_bytes(config: EngineConfig, device: torch.device) -> int:
    if config.swap_memory is not None:
        return config.swap_memory
    usual = CUDA_BYTES if device.type == "cuda" else DISK_BYTES if config.swap_disk else 0
    return min(usual, int(FREE_SHARE * free_memory(torch.device("cpu"))))


def _identity(
    config: EngineConfig, loaded: LoadedModel, kv: KVCacheManager, device: BlockStorage
) -> SwapIdentity:
    layout = repr(kv.groups) + repr(device.widths)
    return SwapIdentity(
        kv_format=kv_format_of(loaded.dtype).identity,
        model_revision=f"{loaded.revision} with quantization {config.quantization}",
        layout=hashlib.sha256(layout.encode()).hexdigest(),
        block_size=kv.block_size,
        block_bytes=device.bytes_per_block,
    )


def _copy_rate(transfers: Transfers, device: BlockStorage, num_slots: int) -> float:
    """Bytes per second from the device to the host: the best of three. No block is in use yet."""
    count = min(_MEASURED, device.num_blocks - 1, num_slots)
    moves = BlockMoves(offloads=tuple((1 + index, index) for index in range(count)))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        transfers.move(moves)
        transfers.finish()
        times.append(time.perf_counter() - start)
    return count * device.bytes_per_block / max(min(times), 1e-9)
