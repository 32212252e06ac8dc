"""AdapterManifest: what a config may say, and that nothing in it is silently dropped."""

import json
from typing import Any

import pytest
from peft import LoraConfig

from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.manifest import MAX_CONFIG_BYTES, AdapterManifest

PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}


def parse(**changes: Any) -> AdapterManifest:
    return AdapterManifest.from_json(json.dumps({**PLAIN, **changes}).encode())


def faults(**changes: Any) -> list[str]:
    with pytest.raises(AdapterRejected) as caught:
        parse(**changes)
    return caught.value.faults


def test_reads_what_decides_the_output() -> None:
    manifest = parse(
        lora_alpha=2.5,
        use_rslora=True,
        rank_pattern={"k_proj": 2},
        alpha_pattern={"k_proj": 1},
        exclude_modules=["lm_head"],
        layers_to_transform=3,
        layers_pattern="layers",
        alora_invocation_tokens=[5, 6],
        base_model_name_or_path="org/base",
    )
    assert manifest == AdapterManifest(
        rank=4,
        alpha=2.5,
        use_rslora=True,
        rank_pattern={"k_proj": 2},
        alpha_pattern={"k_proj": 1.0},
        target_modules=("q_proj",),
        exclude_modules=("lm_head",),
        layers_to_transform=(3,),
        layers_pattern=("layers",),
        invocation_tokens=[5, 6],
        base_model="org/base",
    )


def test_defaults_are_those_of_peft() -> None:
    default = LoraConfig()
    manifest = AdapterManifest.from_json(b'{"peft_type": "LORA", "target_modules": ["q_proj"]}')
    assert (manifest.rank, manifest.alpha) == (default.r, default.lora_alpha)


def test_every_setting_that_peft_saves_is_known() -> None:
    saved = {key: value for key, value in LoraConfig().to_dict().items() if key != "target_modules"}
    assert parse(**json.loads(json.dumps(saved))).target_modules == ("q_proj",)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("bias", "all"),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [1]),
        ("target_parameters", ["experts.down_proj"]),
        ("lora_bias", True),
        ("ensure_weight_tying", True),
        ("megatron_config", {"tp": 2}),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("arrow_config", {"top_k": 3}),
        ("kasa_config", {"beta": 1}),
        ("velora_config", {"scale": 1}),
        ("monteclora_config", {"num_samples": 1}),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "lora_ga"),
        ("peft_type", "IA3"),
        ("a_setting_of_the_future", 7),
        ("another_version", True),
        ("another_version", {"a": 1}),
        ("version_of_lora", 2),
    ],
)
def test_a_feature_that_would_change_the_result_is_refused_by_name(key: str, value: Any) -> None:
    assert any(key in fault for fault in faults(**{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("unsloth_version", "2024.8"),
        ("unsloth_version", 2024.8),
        ("created_by", "a trainer"),
        ("tags", ["support", "de"]),
        ("notes", "second try"),
        ("dataset_url", "https://example.org"),
        ("something_new", None),
        ("something_new", False),
    ],
)
def test_what_other_programs_note_is_no_part_of_the_adapter(key: str, value: Any) -> None:
    assert parse(**{key: value}).fingerprint == parse().fingerprint


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("r", 0),
        ("r", 257),
        ("r", True),
        ("r", 8.0),
        ("r", 10**400),
        ("lora_alpha", "16"),
        ("lora_alpha", None),
        ("lora_alpha", 10**400),
        ("use_rslora", "yes"),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"q_proj": 0}),
        ("alpha_pattern", {"q_proj": []}),
        ("target_modules", None),
        ("target_modules", []),
        ("target_modules", ""),
        ("target_modules", 7),
        ("target_modules", [""]),
        ("target_modules", ["q_proj", 7]),
        ("target_modules", "a" * 5000),
        ("exclude_modules", {"a": 1}),
        ("layers_to_transform", -1),
        ("layers_to_transform", "0"),
        ("layers_to_transform", [0] * 5000),
        ("layers_pattern", 7),
        ("layers_pattern", "layers"),
        ("alora_invocation_tokens", []),
        ("alora_invocation_tokens", ["a"]),
        ("base_model_name_or_path", 7),
        ("modules_to_save", "lm_head"),
    ],
)
def test_a_bad_value_is_refused_by_name(key: str, value: Any) -> None:
    assert any(fault.startswith(key) for fault in faults(**{key: value}))


def test_layers_cannot_be_chosen_beside_a_regex() -> None:
    assert faults(target_modules=".*q_proj", layers_to_transform=[0]) == [
        "layers_to_transform and layers_pattern need target_modules to be a list of names"
    ]


def test_all_faults_are_told_at_once() -> None:
    told = faults(r=0, lora_alpha="x", use_dora=True, bias="all", unheard_of=1)
    assert len(told) == 5


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"7", b'"text"', b"\xff\xfe", b"[" * 100_000, b"NaN"],
    ids=["empty", "cut", "list", "number", "text", "no utf-8", "deep", "nan"],
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(AdapterRejected, match=r"adapter_config\.json"):
        AdapterManifest.from_json(raw)


def test_a_config_of_any_size_is_not_parsed() -> None:
    with pytest.raises(AdapterRejected, match="larger than"):
        AdapterManifest.from_json(b" " * (MAX_CONFIG_BYTES + 1))


def test_faults_beyond_the_first_fifty_are_counted() -> None:
    told = faults(rank_pattern={f"module{i}": 0 for i in range(20_000)})
    assert (len(told), told[-1]) == (51, "and 19,950 more faults")


def test_a_long_value_is_cut_in_the_message() -> None:
    assert max(map(len, faults(bias="x" * 10_000))) < 400


def test_the_order_of_a_set_and_the_base_are_no_part_of_the_identity() -> None:
    one = parse(target_modules=["q_proj", "v_proj"], base_model_name_or_path="a/base")
    other = parse(target_modules=["v_proj", "q_proj"], base_model_name_or_path="b/base")
    assert one.fingerprint == other.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"lora_alpha": 9},
        {"r": 5},
        {"use_rslora": True},
        {"target_modules": ["k_proj"]},
        {"target_modules": "q_proj"},
        {"rank_pattern": {"q_proj": 4}},
        {"alora_invocation_tokens": [1]},
        {"alora_invocation_tokens": [1, 2]},
        {"modules_to_save": ["lm_head"]},
    ],
)
def test_what_decides_the_output_is_part_of_the_identity(change: dict[str, Any]) -> None:
    assert parse(**change).fingerprint != parse().fingerprint


def test_the_order_of_patterns_is_part_of_the_identity() -> None:
    one = parse(rank_pattern={"q_proj": 2, ".*proj": 3})
    other = parse(rank_pattern={".*proj": 3, "q_proj": 2})
    assert one.fingerprint != other.fingerprint


def test_invocation_tokens_make_an_activated_lora() -> None:
    assert parse(alora_invocation_tokens=[1]).activation == "invocation"
    assert parse().activation == "always"
