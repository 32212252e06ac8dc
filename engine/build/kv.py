"""Builds the KV side of one engine: the memory, its pool, and the tiers below."""

from dataclasses import dataclass

from loraplex.adapters.residency.eviction import CostAwareEviction, EvictionPolicy, LRUEviction
from loraplex.engine.build.numerics import numerics_of
from loraplex.engine.build.offload import Offload, build_offload
from loraplex.engine.config import EngineConfig
from loraplex.engine.kv.block_pool import BlockPool
from loraplex.engine.kv.keys import BlockKeyScope
from loraplex.engine.kv.manager import KVCacheManager
from loraplex.engine.kv.metering import Metering
from loraplex.engine.kv.recompute_cost import RecomputeCost, cost_per_token
from loraplex.engine.kv.storage.groups import KVGroup
from loraplex.engine.kv.storage.layout import KVLayout
from loraplex.engine.model.loader import LoadedModel
from loraplex.engine.model.probe import AttentionProbe
from loraplex.engine.worker.attention import AttentionContext, install_attention
from loraplex.engine.worker.kv_cache import KVCache, kv_format_of
from loraplex.engine.worker.kv_memory import KVMemory, free_memory
from loraplex.engine.worker.transfers import STAGED_ON_DEVICE
from loraplex.kernels.kernel_set import Kernels


@dataclass(frozen=True)
class KVParts:
    manager: KVCacheManager
    cache: KVCache
    attention: AttentionContext
    offload: Offload
    recompute: RecomputeCost


def num_kv_blocks(
    config: EngineConfig,
    loaded: LoadedModel,
    probe: AttentionProbe,
    groups: list[KVGroup],
    reserved: int,
) -> int:
    """Returns how many blocks fit; `reserved`: bytes of the free memory that they must leave.

    Raises:
        ConfigRefused: one sequence of the maximum length does not fit.
    """
    if loaded.device.type == "cuda" and config.offload_memory != 0:
        reserved += STAGED_ON_DEVICE
    layers = list(probe.layers.values())
    memory = KVMemory.of(layers, groups, config.block_size, kv_format_of(loaded.dtype))
    return memory.num_blocks(
        config.kv_cache_memory or free_memory(loaded.device, reserved),
        loaded.max_model_len,
        config.max_num_seqs,
        config.max_num_batched_tokens,
    )


def build_kv(
    config: EngineConfig,
    loaded: LoadedModel,
    probe: AttentionProbe,
    kernels: Kernels,
    groups: list[KVGroup],
    num_blocks: int,
) -> KVParts:
    """Allocates so many blocks, and installs the attention that reads them.

    Raises:
        ConfigRefused: the host memory that was asked for is not to be had.
    """
    layout = KVLayout(
        groups, config.block_size, loaded.max_model_len, chunk=config.max_num_batched_tokens
    )
    kv_format, layers = kv_format_of(loaded.dtype), list(probe.layers.values())
    cache = KVCache(layers, layout, kv_format, num_blocks, loaded.device, kernels)
    attention = AttentionContext()
    install_attention(probe, groups, cache, attention)
    scope = BlockKeyScope(
        kv_format=kv_format.identity,
        model_revision=loaded.revision,
        quantization=config.quantization,
        numerics=numerics_of(kernels, loaded.device),
    )
    recompute, metering = RecomputeCost(), Metering()
    offload = build_offload(config, layout, scope, cache, recompute, metering)
    pool = BlockPool(
        num_blocks,
        eviction=eviction_policy(config),
        metering=metering,
        restore_cost=cost_per_token,
        on_evict=offload.tiers.offload,
    )
    manager = KVCacheManager(pool, layout, scope, offload.tiers)
    return KVParts(manager, cache, attention, offload, recompute)


def eviction_policy(config: EngineConfig) -> EvictionPolicy:
    """Returns the eviction policy of cached blocks and of idle adapters."""
    if config.eviction == "lru":
        return LRUEviction()
    return CostAwareEviction(config.eviction_half_life)
