"""The arithmetic of the KV cache, checked on published numbers."""

from pathlib import Path
from typing import Any

import pytest
from support.engine.engines import make_engine
from support.models.architectures import ARCHITECTURES, write_checkpoint
from transformers import LlamaConfig

from loraplex.engine.build.capacity import CapacityQuestion, capacity, main
from loraplex.engine.model.loader import read_config


def llama_2_70b(num_kv_heads: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=4096,
    )


@pytest.mark.parametrize(("num_kv_heads", "gigabytes"), [(64, 10.7), (8, 1.34)])
def test_llama_2_70b_at_4096_tokens_in_float16(num_kv_heads: int, gigabytes: float) -> None:
    found = capacity(llama_2_70b(num_kv_heads), CapacityQuestion(dtype="float16"))
    assert found.bytes_per_sequence / 1e9 == pytest.approx(gigabytes, rel=0.005)


def test_sequences_that_fit() -> None:
    question = CapacityQuestion(dtype="float16", kv_cache_memory=16 * 10**9)
    assert capacity(llama_2_70b(8), question).sequences == 11


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_config_and_engine_agree(architecture: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", architecture)
    found = capacity(read_config(folder), CapacityQuestion(dtype="float32", block_size=4))
    settings: dict[str, Any] = {"kv_cache_memory": 30 * found.bytes_per_block, "max_model_len": 16}
    engine = make_engine(folder, tmp_path / "store", **settings)
    engine.close()
    assert engine.info.num_blocks == 29


def test_adapters_are_counted_on_every_linear() -> None:
    question = CapacityQuestion(dtype="float16", max_adapter_slots=32)
    layer = 2 * (8192 + 8192) + 2 * (8192 + 1024) + 3 * (8192 + 28672)

    assert capacity(llama_2_70b(8), question).adapters == 32 * 16 * 80 * layer * 2


def test_the_engine_leaves_its_adapters_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "m", "llama")
    monkeypatch.setattr(
        "loraplex.engine.build.kv.free_memory", lambda device, reserved: (1 << 19) - reserved
    )

    blocks = []
    for memory in (0, 1 << 18):
        settings = {"kv_cache_memory": None, "adapter_memory": memory, "max_model_len": 32}
        engine = make_engine(folder, tmp_path / "store", **settings, max_num_seqs=32)
        engine.close()
        blocks.append(engine.info.num_blocks + 1)

    bytes_per_block = capacity(
        read_config(folder), CapacityQuestion(dtype="float32", block_size=4)
    ).bytes_per_block
    assert blocks == [(1 << 19) // bytes_per_block, (1 << 18) // bytes_per_block]


def test_the_command_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path / "m", "llama")
    assert main([str(folder), "--kv-cache-memory", "1000000", "--adapter-memory", "3145728"]) == 0
    printed = capsys.readouterr().out
    assert "bytes per token" in printed
    assert "768 (float32)" in printed
    assert "3.0 MiB" in printed


def test_the_command_refuses_a_wrong_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / f"a long name with [brackets] {'x' * 60}"
    assert main([str(folder)]) == 1
    assert f"{folder} is no Hugging Face model folder" in capsys.readouterr().err
