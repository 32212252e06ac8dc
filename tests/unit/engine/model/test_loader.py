"""What a model folder must be, and what is refused at start with its reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.engines import make_engine
from support.models.architectures import write_checkpoint

from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import ConfigRefused, UnsupportedModel
from loraplex.engine.model.loader import load_model, read_config, revision


def load(folder: Path, **settings: Any) -> Any:
    return load_model(EngineConfig(model=str(folder), adapter_store=str(folder), **settings))


def write_config(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"has no config\.json"):
        read_config(tmp_path)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no Hugging Face model folder"):
        read_config(tmp_path / "nowhere")


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    folder = write_config(tmp_path, model_type="t5", is_encoder_decoder=True)
    with pytest.raises(UnsupportedModel, match="only decoder-only models"):
        read_config(folder)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="vit is no causal language model"):
        read_config(write_config(tmp_path, model_type="vit"))


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="does not recognize this architecture"):
        read_config(write_config(tmp_path, model_type="never-heard-of"))


def test_broken_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="cannot read"):
        read_config(tmp_path)


def test_a_state_space_model_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", "llama")
    mamba = write_mamba(tmp_path / "mamba")
    for file in folder.glob("tokenizer*"):
        (mamba / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UnsupportedModel, match="mamba is not supported"):
        make_engine(mamba, tmp_path / "store", max_model_len=64)


def write_mamba(folder: Path) -> Path:
    from transformers import MambaConfig, MambaForCausalLM  # noqa: PLC0415 - slow to import

    config = MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=4)
    MambaForCausalLM(config).save_pretrained(folder)
    return folder


def test_more_positions_than_the_model_has_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", "llama")
    with pytest.raises(ConfigRefused, match=r"max_model_len is 257, but .* end at 256"):
        load(folder, max_model_len=257)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_without_a_device_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", "llama")
    with pytest.raises(ConfigRefused, match="finds no CUDA device"):
        load(folder, device="cuda")


def longrope(folder: Path) -> Path:
    factors = [1.0] * 8
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
    }
    return write_checkpoint(
        folder, "phi3", rope_parameters=rope, original_max_position_embeddings=64
    )


def test_a_rotary_embedding_that_depends_on_the_longest_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigRefused, match="--max-model-len 64 or less"):
        load(longrope(tmp_path / "m"))


def test_it_is_accepted_where_its_length_cannot_change_it(tmp_path: Path) -> None:
    assert load(longrope(tmp_path / "m"), max_model_len=64).max_model_len == 64


def test_auto_takes_the_checkpoints_dtype(tmp_path: Path) -> None:
    assert load(write_checkpoint(tmp_path / "m", "llama")).dtype is torch.float32


def test_the_revision_follows_the_weights(tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path / "a", "llama", seed=0)
    second = write_checkpoint(tmp_path / "b", "llama", seed=1)
    again = write_checkpoint(tmp_path / "c", "llama", seed=0)
    assert revision(first) == revision(again)
    assert revision(first) != revision(second)


def test_a_cache_too_small_for_one_sequence_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", "llama")
    with pytest.raises(ConfigRefused) as refusal:
        make_engine(folder, tmp_path / "store", kv_cache_memory=20_000)
    message = str(refusal.value)
    assert "one sequence of 256 tokens needs 64 KV blocks of 3,072 bytes" in message
    assert "the KV cache has 19.5 KiB = 5 blocks" in message
    assert "give --max-model-len 20 or less" in message


def test_the_length_that_the_refusal_names_is_accepted(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", "llama")
    engine = make_engine(folder, tmp_path / "store", kv_cache_memory=20_000, max_model_len=20)
    engine.close()
    assert engine.info.num_blocks == 5
