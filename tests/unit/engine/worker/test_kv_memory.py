"""How much memory becomes how many blocks, and what is said where that is too little."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.errors import ConfigRefused
from loraplex.engine.kv.storage.groups import KVGroup, KVLayer, group_layers
from loraplex.engine.kv.storage.layer_state import FullAttention, SlidingWindow
from loraplex.engine.worker.kv_cache import kv_format_of
from loraplex.engine.worker.kv_memory import KVMemory, default_adapter_memory, free_memory, readable

FULL = [KVGroup((0, 1), FullAttention())]
MIXED = [
    KVGroup((0,), FullAttention()),
    KVGroup((1,), SlidingWindow(20)),
    KVGroup((2,), SlidingWindow(7)),
]


def memory_of(groups: list[KVGroup], block_size: int = 16) -> KVMemory:
    return KVMemory(groups, block_size, bytes_per_block=1000)


@pytest.mark.parametrize(("heads", "bytes_per_token"), [(64, 2_621_440), (8, 327_680)])
def test_llama_2_70b_costs_what_its_paper_says(heads: int, bytes_per_token: int) -> None:
    layers = [KVLayer(i, heads, 128, 128, FullAttention()) for i in range(80)]

    memory = KVMemory.of(layers, group_layers(layers), 16, kv_format_of(torch.float16))

    assert memory.bytes_per_block == 16 * bytes_per_token
    assert memory.blocks_at_peak(4096, 1024) * memory.bytes_per_block == 4096 * bytes_per_token


def test_a_block_is_as_large_as_the_largest_layer_in_each_place() -> None:
    layers = [KVLayer(0, 2, 8, 8, FullAttention()), KVLayer(1, 1, 8, 4, SlidingWindow(32))]

    memory = KVMemory.of(layers, group_layers(layers), 4, kv_format_of(torch.float32))

    assert memory.bytes_per_block == 2 * (8 + 8) * 4 * 4


def test_the_null_block_comes_out_of_the_budget() -> None:
    assert memory_of(FULL).num_blocks(10_999, 16, 64, chunk=16) == 10


def test_no_more_blocks_are_taken_than_the_largest_batch_can_use() -> None:
    assert memory_of(FULL).num_blocks(10**9, 160, 3, chunk=16) == 3 * 10 + 1


def test_a_budget_of_exactly_one_sequence_is_enough() -> None:
    assert memory_of(FULL).num_blocks(11_000, 160, 8, chunk=16) == 11


def test_one_sequence_that_does_not_fit_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigRefused) as refusal:
        memory_of(FULL).num_blocks(10_999, 160, 8, chunk=16)

    message = str(refusal.value)
    assert "one sequence of 160 tokens needs 10 KV blocks of 1,000 bytes = 9.8 KiB" in message
    assert "the KV cache has 10.7 KiB = 9 blocks" in message
    assert "--max-model-len 144 or less, or --kv-cache-memory 11000 or more" in message


@given(st.integers(0, 40_000), st.integers(2, 600), st.integers(1, 64))
def test_what_a_refusal_advises_is_accepted(budget: int, length: int, chunk: int) -> None:
    memory = memory_of(MIXED)
    try:
        memory.num_blocks(budget, length, 1, chunk)
    except ConfigRefused as refusal:
        advice = dict(re.findall(r"--([a-z-]+) (\d+)", str(refusal)))
        memory.num_blocks(int(advice["kv-cache-memory"]), length, 1, chunk)
        if "max-model-len" in advice:
            memory.num_blocks(budget, int(advice["max-model-len"]), 1, chunk)


def test_no_length_is_advised_where_none_fits() -> None:
    with pytest.raises(ConfigRefused) as refusal:
        memory_of(MIXED).num_blocks(500, 100, 1, chunk=16)

    assert "max-model-len" not in str(refusal.value)
    assert "500.0 B = 0 blocks" in str(refusal.value)


@given(st.integers(1, 60), st.integers(1, 40), st.sampled_from([1, 4, 16]))
def test_the_longest_sequence_fits_and_one_token_more_does_not(
    num_blocks: int, chunk: int, block_size: int
) -> None:
    memory = memory_of(MIXED, block_size)

    longest = memory.longest(num_blocks, chunk)

    assert memory.blocks_at_peak(longest, chunk) <= num_blocks
    assert memory.blocks_at_peak(longest + 1, chunk) > num_blocks


def test_free_memory_leaves_something_to_others() -> None:
    device = torch.device("cpu")

    assert free_memory(device) > 0
    assert free_memory(device, reserved=2**60) == 0


@pytest.mark.parametrize(("num_slots", "ranks"), [(1, 256), (16, 256), (64, 1024)])
def test_adapters_have_room_for_a_usual_rank_each_or_the_largest_once(
    num_slots: int, ranks: int
) -> None:
    assert default_adapter_memory(1000, num_slots, torch.bfloat16) == ranks * 1000 * 2


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0.0 B"),
        (1023, "1023.0 B"),
        (1536, "1.5 KiB"),
        (3 << 30, "3.0 GiB"),
        (1 << 52, "4096.0 TiB"),
    ],
)
def test_sizes_are_readable(num_bytes: int, text: str) -> None:
    assert readable(num_bytes) == text
