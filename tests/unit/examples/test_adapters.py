"""The trained adapters that the repository carries."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from loraplex.adapters.manifest import AdapterManifest

FOLDER = Path(__file__).parents[3] / "examples" / "adapters"
NAMES = ("json", "sql", "support")
GENERATION_PROMPT = [10354, 22083, 236787, 107]  # "### Assistant:\n" as Gemma's tokenizer has it


def manifest(name: str) -> AdapterManifest:
    return AdapterManifest.from_json((FOLDER / name / "adapter_config.json").read_bytes())


def weights(name: str) -> dict[str, torch.Tensor]:
    return load_file(FOLDER / name / "adapter_model.safetensors")


def test_there_are_three_adapters_and_nothing_else() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == list(NAMES)


def test_all_adapters_together_take_less_than_8_mb() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < 8_000_000


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_is_a_config_and_safetensors(name: str) -> None:
    files = sorted(path.name for path in (FOLDER / name).iterdir())

    assert files == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.parametrize("name", NAMES)
def test_the_config_names_the_public_base_model(name: str) -> None:
    config = json.loads((FOLDER / name / "adapter_config.json").read_text())

    assert config["base_model_name_or_path"] == "google/gemma-3-270m"


@pytest.mark.parametrize("name", NAMES)
def test_every_module_has_a_and_b_of_the_rank_in_the_config(name: str) -> None:
    tensors = weights(name)
    rank = manifest(name).rank

    halves = [key for key in tensors if key.endswith(".lora_A.weight")]

    assert len(halves) * 2 == len(tensors)
    assert {tensors[key].shape[0] for key in halves} == {rank}
    assert {tensors[key.replace("lora_A", "lora_B")].shape[1] for key in halves} == {rank}


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_finite_bfloat16_and_no_b_is_zero(name: str) -> None:
    for key, tensor in weights(name).items():
        assert tensor.dtype == torch.bfloat16, key
        assert tensor.isfinite().all(), key
        assert "lora_B" not in key or tensor.any(), key


def test_the_adapters_differ_in_rank() -> None:
    assert len({manifest(name).rank for name in NAMES}) == len(NAMES)


def test_only_sql_is_activated_and_by_the_generation_prompt() -> None:
    activated = {name: manifest(name).invocation_tokens for name in NAMES}

    assert activated == {"json": None, "sql": GENERATION_PROMPT, "support": None}
