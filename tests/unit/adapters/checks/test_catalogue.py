"""TargetCatalogue: PEFT's rules for what a config names, and faults where PEFT is silent."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from support.models.architectures import VOCAB_SIZE, load_reference, write_checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from loraplex.adapters.checks.catalogue import TargetCatalogue, TargetKind, TargetModule
from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.targets import catalogue_of


def tiny(model_type: str = "llama", **settings: Any) -> TargetCatalogue:
    config = AutoConfig.for_model(
        model_type,
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        **settings,
    )
    return catalogue_of(AutoModelForCausalLM.from_config(config))


@pytest.fixture(scope="module")
def llama() -> TargetCatalogue:
    return tiny()


def manifest(**config: Any) -> AdapterManifest:
    raw = msgspec.json.encode({"peft_type": "LORA", "target_modules": ["q_proj"], **config})
    return AdapterManifest.from_json(raw)


def faults(catalogue: TargetCatalogue, **config: Any) -> list[str]:
    with pytest.raises(AdapterRejected) as caught:
        catalogue.resolve(manifest(**config))
    return caught.value.faults


def test_lists_modules_by_what_they_are(llama: TargetCatalogue) -> None:
    modules = llama.modules
    assert modules["model.embed_tokens"].kind is TargetKind.EMBEDDING
    assert modules["lm_head"].kind is TargetKind.LM_HEAD
    assert modules["model.layers.0.mlp.down_proj"] == TargetModule(
        "model.layers.0.mlp.down_proj", TargetKind.LINEAR, 24, 16
    )
    assert llama.vocab_size == VOCAB_SIZE


SELECTIONS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "mlp.gate_proj", "model.layers.3.mlp.up_proj"]},
    {"target_modules": r"model\.layers\.1\d?\..*proj"},
    {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]},
    {"target_modules": ["q_proj", "k_proj"], "exclude_modules": r".*\.1\..*"},
    {"target_modules": ["q_proj"], "layers_to_transform": [0, 10]},
    {"target_modules": ["q_proj"], "layers_to_transform": 1},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "layers"]},
    {"target_modules": ["lm_head", "embed_tokens", "v_proj"]},
    {"target_modules": ["lm_head", "q_proj"], "layers_to_transform": [1]},
    {"target_modules": ["lm_head"], "layers_to_transform": [1]},
    {
        "target_modules": ["model.layers.3.mlp.up_proj", "up_proj", "model.embed_tokens"],
        "layers_to_transform": [0, 1],
        "layers_pattern": "layers",
    },
    {"target_modules": ["lm_head", "q_proj"], "modules_to_save": ["lm_head"]},
    {
        "target_modules": "(lm_head|.*embed_tokens|.*q_proj)",
        "modules_to_save": ["lm_head", "embed_tokens"],
    },
]


@pytest.mark.parametrize("config", SELECTIONS)
def test_selects_what_peft_selects(llama: TargetCatalogue, config: dict[str, Any]) -> None:
    peft_config = LoraConfig(**config)
    names = [*llama.modules, *llama.others]
    expected = {name for name in names if check_target_module_exists(peft_config, name)}
    assert llama.resolve(manifest(**config)).keys() == expected


PATTERNS: list[dict[str, int]] = [
    {"layers.0.self_attn.q_proj": 4},
    {"layers.1.self_attn.q_proj": 4, "q_proj": 5},
    {"q_proj": 5, "layers.1.self_attn.q_proj": 4},
    {"^model.layers.1.self_attn.q_proj": 4},
    {r"model\.layers\.(0|11)\..*": 3, "k_.roj": 6},
    {"layers.1..*": 7},
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_gives_what_peft_gives(llama: TargetCatalogue, pattern: dict[str, int]) -> None:
    targets = llama.resolve(manifest(target_modules=["q_proj", "k_proj"], rank_pattern=pattern))
    expected = {name: pattern.get(get_pattern_key(pattern, name), 8) for name in targets}
    assert {name: target.rank for name, target in targets.items()} == expected


def test_scaling_follows_both_patterns(llama: TargetCatalogue) -> None:
    targets = llama.resolve(
        manifest(r=16, lora_alpha=16, rank_pattern={"1.self_attn.q_proj": 4}, use_rslora=True)
    )
    assert targets["model.layers.0.self_attn.q_proj"].scaling == 4.0
    assert targets["model.layers.1.self_attn.q_proj"].scaling == 8.0


def test_all_linear_leaves_lm_head_and_the_embedding(llama: TargetCatalogue) -> None:
    targets = llama.resolve(manifest(target_modules="ALL-linear"))
    assert {t.module.kind for t in targets.values()} == {TargetKind.LINEAR}
    assert len(targets) == 7 * 12


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"target_modules": ["q_proj", "q_porj"]}, "'q_porj'"),
        ({"target_modules": "q_proj"}, "'q_proj'"),
        ({"rank_pattern": {"q_porj": 4}}, "'q_porj'"),
        ({"alpha_pattern": {"^q_proj": 4}}, r"'\^q_proj'"),
        ({"rank_pattern": {"k_proj": 4}}, "'k_proj'"),
        ({"layers_to_transform": [1, 99]}, "99"),
        ({"target_modules": ["lm_head", "q_proj"], "layers_to_transform": [99]}, "99"),
        ({"modules_to_save": ["o_proj"]}, "modules_to_save.*'o_proj'"),
        ({"modules_to_save": ["score"]}, "modules_to_save.*'score'"),
        ({"exclude_modules": ["q_proj"]}, "no module"),
        ({"target_modules": ["self_attn"]}, "model.layers.0.self_attn"),
        ({"target_modules": ["norm"]}, "model.norm"),
        ({"target_modules": "("}, "not a valid regular expression"),
        ({"rank_pattern": {"(": 4}}, "not a valid regular expression"),
        ({"alora_invocation_tokens": [VOCAB_SIZE]}, str(VOCAB_SIZE)),
        (
            {"alora_invocation_tokens": [1], "target_modules": ["embed_tokens"]},
            "activated LoRA",
        ),
    ],
)
def test_what_matches_nothing_or_cannot_be_served_is_named(
    llama: TargetCatalogue, config: dict[str, Any], named: str
) -> None:
    with pytest.raises(AdapterRejected, match=named):
        llama.resolve(manifest(**config))


def test_all_faults_are_told_at_once(llama: TargetCatalogue) -> None:
    told = faults(llama, target_modules=["q_proj", "nope", "norm"], rank_pattern={"x": 4})
    assert len(told) == 3


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    model = load_reference(write_checkpoint(tmp_path / "moe", "qwen3_moe"))
    told = faults(catalogue_of(model), target_modules=["q_proj", "experts"])
    assert "experts" in told[0]
    assert "model.layers.0.mlp.experts" in told[0]
