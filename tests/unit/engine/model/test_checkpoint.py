"""Every tensor of a checkpoint is the model's and the model's are all there, or it is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.engines import make_engine, request, run_one
from support.models.architectures import write_checkpoint
from torch import Tensor

from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.model.loader import load_model

UP = "model.layers.1.mlp.up_proj.weight"
Tensors = dict[str, Tensor]


def load(folder: Path) -> Any:
    return load_model(EngineConfig(model=str(folder), adapter_store=str(folder)))


def change_tensors(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def change_config(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m", "llama")


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize("name", [UP, "lm_head.weight", "model.norm.weight"])
def test_a_missing_tensor_is_refused_by_its_name(folder: Path, name: str) -> None:
    change_tensors(folder, without(name))

    with pytest.raises(UnsupportedModel, match=rf"1 tensors are missing \({name}\)"):
        load(folder)


def test_a_tied_tensor_may_be_left_out(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", "gemma3_text")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")

    model = load(folder).model

    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_both_of_a_tied_pair_may_not(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", "gemma3_text")
    change_tensors(folder, without("model.embed_tokens.weight"))

    with pytest.raises(UnsupportedModel, match=r"missing \(.*model\.embed_tokens\.weight\)"):
        load(folder)


def test_names_with_another_prefix_are_refused(folder: Path) -> None:
    change_tensors(folder, lambda tensors: {f"x.{key}": value for key, value in tensors.items()})

    with pytest.raises(UnsupportedModel) as refusal:
        load(folder)

    assert "30 tensors are missing (lm_head.weight, model.embed_tokens" in refusal.value.message
    assert "30 tensors belong to no part of it (x.lm_head.weight" in refusal.value.message


def test_a_config_with_more_layers_is_refused(folder: Path) -> None:
    change_config(folder, num_hidden_layers=4)

    with pytest.raises(UnsupportedModel, match=r"9 tensors are missing \(model\.layers\.3\."):
        load(folder)


def test_a_config_with_fewer_layers_is_refused(folder: Path) -> None:
    change_config(folder, num_hidden_layers=2)

    with pytest.raises(UnsupportedModel, match=r"9 tensors belong to no part .*model\.layers\.2\."):
        load(folder)


def test_a_tensor_that_its_module_would_not_add_is_refused(folder: Path) -> None:
    bias = "model.layers.0.self_attn.q_proj.bias"
    change_tensors(folder, lambda tensors: {**tensors, bias: torch.ones(64)})

    with pytest.raises(UnsupportedModel, match=rf"1 tensors belong to no part of it \({bias}\)"):
        load(folder)


def test_a_part_that_the_model_does_not_have_is_left_out(folder: Path) -> None:
    vision = {"vision_tower.layers.0.weight": torch.ones(2), "projector.bias": torch.ones(2)}
    change_tensors(folder, lambda tensors: tensors | vision)

    assert load(folder).vocab_size == 320


def test_an_index_that_lists_half_of_the_files_is_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(without(UP)(tensors), folder / "a.safetensors", metadata={"format": "pt"})
    save_file({UP: tensors[UP]}, folder / "b.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(without(UP)(tensors), "a.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(UnsupportedModel, match=rf"1 tensors are missing \({UP}\)"):
        load(folder)


def test_an_index_that_names_a_file_which_is_not_there_is_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "a.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(UnsupportedModel, match=r"cannot load the model .*a\.safetensors"):
        load(folder)


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("intermediate_size", 128, r"up_proj\.weight has shape \[96, 64\], not \[128, 64\]"),
        ("num_key_value_heads", 1, r"k_proj\.weight has shape \[32, 64\], not \[16, 64\]"),
        ("vocab_size", 300, r"embed_tokens\.weight has shape \[320, 64\], not \[300, 64\]"),
    ],
)
def test_a_config_of_other_sizes_is_refused_with_both_shapes(
    folder: Path, setting: str, value: int, said: str
) -> None:
    change_config(folder, **{setting: value})

    with pytest.raises(UnsupportedModel, match=said):
        load(folder)


@pytest.mark.parametrize("length", [0, 4, 1000, -1000])
def test_a_file_that_was_cut_short_is_named(folder: Path, length: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])

    with pytest.raises(UnsupportedModel, match=rf"cannot read {path}: .* cut short or damaged"):
        load(folder)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()

    with pytest.raises(UnsupportedModel, match="cannot load the model"):
        load(folder)


def test_weights_in_a_pickle_are_not_opened(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()

    with pytest.raises(UnsupportedModel, match="cannot load the model"):
        load(folder)


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq"])
def test_a_quantized_checkpoint_is_refused_in_one_line(folder: Path, method: str) -> None:
    quantization = {"quant_method": method, "bits": 4, "load_in_4bit": method == "bitsandbytes"}
    change_config(folder, quantization_config=quantization)

    with pytest.raises(UnsupportedModel, match=f"quantized by {method}") as refusal:
        load(folder)

    assert "\n" not in refusal.value.message


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("hidden_act", "never"),
        ("hidden_size", "64"),
        ("num_attention_heads", 0),
        ("vocab_size", -1),
    ],
)
def test_a_config_that_makes_no_model_is_refused_in_one_line(
    folder: Path, setting: str, value: object
) -> None:
    change_config(folder, **{setting: value})

    with pytest.raises(UnsupportedModel) as refusal:
        load(folder)

    assert "\n" not in refusal.value.message


def test_an_adapter_beside_the_model_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")

    with pytest.raises(UnsupportedModel, match=r"beside the base model; .* with --adapter"):
        load(folder)


@pytest.mark.parametrize("kernels", ["auto", "naive"])
def test_the_files_may_end_while_the_model_is_served(
    folder: Path, tmp_path: Path, kernels: str
) -> None:
    want = run_one(make_engine(folder, tmp_path / "store", kernels=kernels), request([5, 6, 7]))
    engine = make_engine(folder, tmp_path / "store", kernels=kernels)

    (folder / "model.safetensors").write_bytes(b"")

    assert run_one(engine, request([5, 6, 7])).token_ids == want.token_ids
    assert "model.safetensors" not in Path("/proc/self/maps").read_text()
    engine.close()


def test_end_tokens_outside_the_vocabulary_are_left_out(folder: Path, tmp_path: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 400, -1]}))
    engine = make_engine(folder, tmp_path / "store")

    answer = run_one(engine, request([5, 6, 7], ignore_eos=False, min_tokens=2, max_tokens=4))

    assert engine.info.eos_token_ids == [1]
    assert len(answer.token_ids) >= 2
    engine.close()


def test_a_tokenizer_that_cannot_be_read_is_refused_with_its_file(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "tokenizer.json").write_text("{}")

    with pytest.raises(UnsupportedModel, match=r"cannot read .*tokenizer\.json"):
        make_engine(folder, tmp_path / "store")
