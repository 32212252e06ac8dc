"""Settings that cannot work are refused together, before anything is loaded."""

from typing import Any

import pytest

from loraplex.engine.config import EngineConfig


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(model="model", adapter_store="store", **settings)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"dtype": "int8"}, "dtype must be one of auto, float32, bfloat16, float16, got 'int8'"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, got 'tpu'"),
        ({"max_model_len": 1}, "max_model_len must be at least 2, got 1"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"kv_cache_memory": 0}, "kv_cache_memory must be at least 1, got 0"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"max_adapter_slots": 0}, "max_adapter_slots must be at least 1, got 0"),
        ({"adapter_memory": -1}, "adapter_memory must be at least 0, got -1"),
        ({"adapter_wait": -1.0}, "adapter_wait must be at least 0.0, got -1.0"),
        ({"adapter_wait": float("nan")}, "adapter_wait must be at least 0.0, got nan"),
        ({"num_threads": 0}, "num_threads must be at least 1, got 0"),
        (
            {"max_num_seqs": 9, "max_num_batched_tokens": 8},
            r"max_num_batched_tokens \(8\) must be at least max_num_seqs \(9\)",
        ),
    ],
)
def test_a_setting_out_of_range_is_refused_by_its_name(
    settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        config(**settings)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"block_size.*; dtype.*; device"):
        config(block_size=0, dtype="x", device="y")


def test_the_defaults_can_be_served() -> None:
    assert config().max_num_batched_tokens >= config().max_num_seqs
