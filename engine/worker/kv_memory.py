"""Chooses the number of KV blocks, and checks that a sequence of the maximum length fits."""

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from loraplex.adapters.manifest import MAX_RANK
from loraplex.engine.errors import ConfigRefused
from loraplex.engine.kv.storage.format import KVFormat
from loraplex.engine.kv.storage.groups import KVGroup, KVLayer, blocks_at_peak
from loraplex.engine.worker.kv_cache import numbers_per_block

CPU_SHARE = 0.5  # of the memory that is free once the model is loaded
CUDA_SHARE = 0.9
USUAL_RANK = 16  # for which every adapter slot has room by default, on all linears
MIN_MODEL_LEN = 2  # a prompt token and one to generate
_CGROUP = Path("/sys/fs/cgroup")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class KVMemory:
    """The cost of KV blocks.

    A block holds `block_size` tokens for the layers of one group; a sequence has a table per group.
    """

    groups: list[KVGroup]
    block_size: int
    bytes_per_block: int

    @classmethod
    def of(
        cls, layers: list[KVLayer], groups: list[KVGroup], block_size: int, kv_format: KVFormat
    ) -> "KVMemory":
        numbers = sum(numbers_per_block(layers, groups, block_size, kv_format))
        return cls(groups, block_size, numbers * kv_format.number_bytes)

    def blocks_at_peak(self, num_tokens: int, chunk: int) -> int:
        return blocks_at_peak(self.groups, self.block_size, num_tokens, chunk)

    def longest(self, num_blocks: int, chunk: int) -> int:
        """Returns the length in tokens of the longest sequence that this many blocks hold."""
        low, high = 0, num_blocks * self.block_size
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.blocks_at_peak(middle, chunk) <= num_blocks
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def num_blocks(self, budget: int, max_model_len: int, max_num_seqs: int, chunk: int) -> int:
        """Returns the blocks to allocate within a budget of bytes, the null block included; never
        more than the largest batch could use.

        Raises:
            ConfigRefused: with the arithmetic, if one sequence of the maximum length does not fit.
        """
        affordable = max(0, budget // self.bytes_per_block - 1)
        needed = self.blocks_at_peak(max_model_len, chunk)
        if needed > affordable:
            raise ConfigRefused(
                f"one sequence of {max_model_len:,} tokens needs {needed:,} KV blocks of "
                f"{self.bytes_per_block:,} bytes = {readable(needed * self.bytes_per_block)}, but "
                f"the KV cache has {readable(budget)} = {affordable:,} blocks "
                f"and the null block; give {self._ways_out(affordable, needed, chunk)}"
            )
        return min(affordable, needed * max_num_seqs) + 1

    def _ways_out(self, affordable: int, needed: int, chunk: int) -> str:
        memory = f"--kv-cache-memory {(needed + 1) * self.bytes_per_block} or more"
        longest = self.longest(affordable, chunk)
        return (
            memory if longest < MIN_MODEL_LEN else f"--max-model-len {longest} or less, or {memory}"
        )


def default_adapter_memory(numbers_per_rank: int, num_slots: int, dtype: torch.dtype) -> int:
    """Returns the bytes for resident adapters: all slots with a usual rank, or one with the
    largest.

    Args:
        numbers_per_rank: of an adapter on all linears.
    """
    return max(num_slots * USUAL_RANK, MAX_RANK) * numbers_per_rank * dtype.itemsize


def free_memory(device: torch.device, reserved: int = 0) -> int:
    """Returns the bytes that the KV cache may take by default: a share of the memory that is free
    on the device, after `reserved` bytes for other uses.

    On CUDA, memory that torch holds counts as used: it belongs to the steps that ran before.
    """
    if device.type == "cuda":
        free, share = float(torch.cuda.mem_get_info(device)[0]), CUDA_SHARE
    else:
        free, share = min(psutil.virtual_memory().available, _cgroup_headroom()), CPU_SHARE
    return max(0, int((free - reserved) * share))


def readable(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            return f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def _cgroup_headroom() -> float:
    """Returns what a container's memory limit leaves; infinite without a limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if limit == "max" else max(0.0, int(limit) - used)
