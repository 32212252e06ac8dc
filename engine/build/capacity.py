"""What a model's KV cache costs and how many sequences fit: `loraplex capacity MODEL`."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from loraplex.adapters.targets import catalogue_of
from loraplex.engine.config import DEVICES, DTYPES, EngineConfig, defaults
from loraplex.engine.errors import StartRefused
from loraplex.engine.kv.storage.groups import KVGroup, KVLayer, group_layers
from loraplex.engine.kv.storage.layer_state import SlidingWindow
from loraplex.engine.model.loader import (
    choose_device,
    choose_dtype,
    choose_max_model_len,
    read_config,
)
from loraplex.engine.model.probe import ATTENTION, probe_layers
from loraplex.engine.worker.kv_cache import kv_format_of
from loraplex.engine.worker.kv_memory import KVMemory, default_adapter_memory, free_memory, readable

_GB = 1e9


@dataclass(frozen=True)
class Capacity:
    """The arithmetic of one model's KV cache. Sizes in bytes, lengths in tokens."""

    layers: list[KVLayer]
    groups: list[KVGroup]
    dtype: torch.dtype
    max_model_len: int
    bytes_per_token: int  # in all layers; behind a sliding window a token costs less
    bytes_per_block: int  # of one group
    bytes_per_sequence: int  # of the maximum length, at its peak
    weights: int
    adapters: int  # what resident ones may take together
    cache: int  # what the cache may take
    sequences: int  # of the maximum length that fit in it


@dataclass(frozen=True)
class CapacityQuestion:
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    block_size: int = 8
    kv_cache_memory: int | None = None
    max_adapter_slots: int = 16
    adapter_memory: int | None = None
    chunk: int = 1024  # tokens of one step


def capacity(config: PretrainedConfig, question: CapacityQuestion) -> Capacity:
    """Computes the figures from a model's config alone: no weights are read or allocated.

    Raises:
        StartRefused: when the model or a setting cannot be served.
    """
    device = choose_device(question.device)
    dtype = choose_dtype(question.dtype, config, device)
    length = choose_max_model_len(question.max_model_len, config)
    model, layers = _model(config, length)
    groups = group_layers(layers)
    kv_format = kv_format_of(dtype)
    memory = KVMemory.of(layers, groups, question.block_size, kv_format)
    weights = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    adapters = question.adapter_memory
    if adapters is None:
        numbers = catalogue_of(model).linear_numbers_per_rank
        adapters = default_adapter_memory(numbers, question.max_adapter_slots, dtype)
    cache = question.kv_cache_memory or free_memory(device, reserved=weights + adapters)
    needed = memory.blocks_at_peak(length, question.chunk)
    return Capacity(
        layers=layers,
        groups=groups,
        dtype=dtype,
        max_model_len=length,
        bytes_per_token=sum(kv_format.num_bytes(layer, 1) for layer in layers),
        bytes_per_block=memory.bytes_per_block,
        bytes_per_sequence=needed * memory.bytes_per_block,
        weights=weights,
        adapters=adapters,
        cache=cache,
        sequences=max(0, cache // memory.bytes_per_block - 1) // needed,
    )


def _model(config: PretrainedConfig, max_model_len: int) -> tuple[PreTrainedModel, list[KVLayer]]:
    """Returns the model, built without memory, and what its layers store."""
    with torch.device("meta"), torch.inference_mode():
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=ATTENTION, dtype=torch.bfloat16
        )
        probe = probe_layers(model, max_model_len)
    return model, [probe.layers[index] for index in sorted(probe.layers)]


def _table(found: Capacity) -> Table:
    sliding = [la.state for la in found.layers if isinstance(la.state, SlidingWindow)]
    windows = sorted({state.window for state in sliding}) or ""
    num_full = len(found.layers) - len(sliding)
    name = str(found.dtype).removeprefix("torch.")
    per_sequence = found.bytes_per_sequence
    rows = [
        (
            "layers",
            f"{num_full} full, {len(sliding)} sliding {windows}",
        ),
        ("KV groups", f"{len(found.groups)} of {len(found.groups[0].layers)} layers"),
        ("bytes per token", f"{found.bytes_per_token:,} ({name})"),
        ("bytes per block of one group", f"{found.bytes_per_block:,}"),
        (
            f"one sequence of {found.max_model_len:,} tokens",
            f"{per_sequence:,} bytes = {per_sequence / _GB:.2f} GB = {readable(per_sequence)}",
        ),
        ("weights", readable(found.weights)),
        ("memory for resident adapters", readable(found.adapters)),
        ("memory for the KV cache", readable(found.cache)),
        (f"sequences of {found.max_model_len:,} tokens that fit", f"{found.sequences:,}"),
    ]
    table = Table(show_header=False)
    for row in rows:
        table.add_row(*row)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    served = defaults(EngineConfig)
    block_size, slots = served["block_size"], served["max_adapter_slots"]
    parser = argparse.ArgumentParser(prog="loraplex capacity", description=__doc__)
    parser.add_argument("model", type=Path, help="a Hugging Face folder, or just its config.json")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of KV and weights")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="whose free memory")
    parser.add_argument("--max-model-len", type=int, help="default: what the config says")
    parser.add_argument(
        "--block-size", type=int, default=block_size, help=f"tokens per block ({block_size})"
    )
    parser.add_argument("--kv-cache-memory", type=int, help="bytes; default: from what is free")
    parser.add_argument("--max-adapter-slots", type=int, default=slots, help=f"of all ({slots})")
    parser.add_argument("--adapter-memory", type=int, help="bytes; default: rank 16 in each slot")
    options = parser.parse_args(arguments)
    folder = options.model.parent if options.model.name == "config.json" else options.model
    question = CapacityQuestion(
        options.dtype,
        options.device,
        options.max_model_len,
        options.block_size,
        options.kv_cache_memory,
        options.max_adapter_slots,
        options.adapter_memory,
    )
    try:
        found = capacity(read_config(folder), question)
    except StartRefused as error:
        console = Console(stderr=True, highlight=False)
        console.print(f"loraplex capacity: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    Console().print(_table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
