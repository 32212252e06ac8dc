"""EngineConfig: every setting of one engine, with its default. Torch-free."""

from typing import Any

import msgspec

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
KERNELS = ("auto", "naive", "triton")
QUANTIZATIONS = ("none", "int8")
EVICTION = ("cost", "lru")
SCHEDULING = ("fair", "fcfs")
MAX_THREADS = 1024


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's settings.

    Raises:
        ValueError: on construction, naming every setting at fault.
    """

    model: str  # a local Hugging Face folder
    adapter_store: str  # folder of the engine's own copies of adapters, by digest
    dtype: str = "auto"  # auto: the checkpoint's, and bfloat16 where that says float16 on a CPU
    device: str = "auto"  # auto: cuda where there is one
    max_model_len: int | None = None  # None: what the model's config says
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024  # token budget of one step
    max_num_waiting: int = 4096  # prompts of one tenant that may wait
    kv_cache_memory: int | None = None  # bytes; None: from the memory that is free
    block_size: int = 8
    kv_group_size: int | None = None  # layers that share a block; None: by the stored adapters
    offload_memory: int | None = (
        None  # bytes of host memory for evicted blocks; None: see build/offload.py
    )
    offload_disk: int = 0  # bytes of files for blocks that host memory evicts; 0: none
    max_adapter_slots: int = 16
    adapter_memory: int | None = None  # bytes of resident adapters; None: `default_adapter_memory`
    eviction: str = "cost"  # of cached blocks and idle adapters; lru: by their last use alone
    eviction_half_life: float = 120.0  # seconds after which a use counts half
    scheduling: str = "fair"  # between tenants; fcfs: by arrival, whoever asks
    adapter_wait: float = 2.0  # seconds until a slot is drained for a waiting adapter
    seed: int | None = None  # of requests that bring none, by arrival; None: drawn for each
    num_threads: int | None = None  # None: torch's choice
    kernels: str = "auto"  # auto: the fastest that the machine has; naive: plain torch
    quantization: str = "none"  # int8: linears with eight-bit weights and activations

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be at least {low}, got {value}"
            for name, low in _MINIMA
            if (value := getattr(self, name)) is not None and not value >= low
        ]
        faults += [
            f"{name} must be at most {high:g}, got {value}"
            for name, high in _MAXIMA
            if (value := getattr(self, name)) is not None and not value <= high
        ]
        faults += [
            f"{name} must be one of {', '.join(choices)}, got {value!r}"
            for name, choices in _CHOICES
            if (value := getattr(self, name)) not in choices
        ]
        if self.offload_disk > 0 and self.offload_memory == 0:
            faults.append(
                "offload_disk needs an offload_memory above 0, which its blocks pass through"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            faults.append(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), so that each gets a token in every step"
            )
        if faults:
            raise ValueError("; ".join(faults))


class HangLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How long an engine may show no progress, in seconds."""

    hang_timeout: float = 10.0  # without a heartbeat, or standing still without computing
    step_timeout: float = 300.0  # computing in one step; silent at the start and the end


def defaults(kind: type[EngineConfig | HangLimits]) -> dict[str, Any]:
    """Returns the default of each setting that has one, so that it is written down once."""
    fields = msgspec.structs.fields(kind)
    return {field.name: field.default for field in fields if not field.required}


_CHOICES = (
    ("dtype", DTYPES),
    ("device", DEVICES),
    ("eviction", EVICTION),
    ("scheduling", SCHEDULING),
    ("kernels", KERNELS),
    ("quantization", QUANTIZATIONS),
)
_MAXIMA = (
    ("num_threads", MAX_THREADS),
    ("eviction_half_life", 1e9),
    ("adapter_wait", 1e9),
)
_MINIMA = (
    ("max_model_len", 2),
    ("max_num_seqs", 1),
    ("max_num_batched_tokens", 1),
    ("max_num_waiting", 1),
    ("kv_cache_memory", 1),
    ("block_size", 1),
    ("kv_group_size", 1),
    ("offload_memory", 0),
    ("offload_disk", 0),
    ("max_adapter_slots", 1),
    ("adapter_memory", 0),
    ("eviction_half_life", 0.001),
    ("adapter_wait", 0.0),
    ("num_threads", 1),
)
