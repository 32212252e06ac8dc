"""An adapter in a slot gives what PEFT gives, in float32, and never nothing."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.models.adapters import (
    PEFT_NOISE,
    Served,
    edit_config,
    edit_tensors,
    peft_logits,
    write_adapter,
)
from support.models.architectures import (
    ARCHITECTURES,
    VOCAB_SIZE,
    load_reference,
    write_checkpoint,
)
from transformers import GPT2Config, GPT2LMHeadModel

from loraplex.kernels.lora.batch import BASE_SLOT

pytestmark = PEFT_NOISE

TOLERANCE = 1e-4  # of float32 logits of some ten units
EFFECT = 0.1  # what an adapter changes at least
RANKS = [1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("untied") / "base", "llama")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied") / "base"
    return write_checkpoint(folder, "gemma3_text", tie_word_embeddings=True)


@pytest.fixture
def served(llama: Path, tmp_path: Path) -> Iterator[Served]:
    served = Served(llama, tmp_path / "store", num_slots=len(RANKS))
    yield served
    served.close()


def prompts(batch: int = 1, length: int = 9) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, VOCAB_SIZE, (batch, length), generator=generator)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=1e-4)


def assert_equals_peft(base: Path, adapter: Path, store: Path) -> None:
    """The adapter's logits are PEFT's, and differ from the base model's."""
    ids = prompts()
    served = Served(base, store)
    got = served.adapted(adapter, ids)
    served.close()
    assert_close(got, peft_logits(base, adapter, ids))
    assert (got - peft_logits(base, None, ids)).abs().max() > EFFECT


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(architecture: str, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", architecture)
    targets = ATTENTION if architecture in ("qwen3_moe", "mixtral") else "all-linear"
    adapter = write_adapter(base, tmp_path / "adapter", r=4, target_modules=targets)
    assert_equals_peft(base, adapter, tmp_path / "store")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_base_only_batch_computes_what_transformers_computes(
    architecture: str, tmp_path: Path
) -> None:
    base = write_checkpoint(tmp_path / "base", architecture)
    served = Served(base, tmp_path / "store")
    assert_close(served.base(prompts()), peft_logits(base, None, prompts()))
    served.close()


@pytest.mark.parametrize("rank", RANKS)
def test_every_rank(rank: int, llama: Path, tmp_path: Path) -> None:
    adapter = write_adapter(llama, tmp_path / "a", r=rank, lora_alpha=2, target_modules=ATTENTION)
    assert_equals_peft(llama, adapter, tmp_path / "store")


COPIES: dict[str, dict[str, Any]] = {
    "saved beside the adapter": {},
    "by modules_to_save": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "by modules_to_save, which LoRA would adapt": {
        "modules_to_save": ["lm_head"],
        "target_modules": ["lm_head", "q_proj"],
    },
}


@pytest.mark.parametrize("base", ["llama", "tied"])
@pytest.mark.parametrize("config", COPIES.values(), ids=COPIES.keys())
def test_copies_of_unchanged_embeddings(
    base: str, config: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    checkpoint = request.getfixturevalue(base)
    adapter = write_adapter(
        checkpoint,
        tmp_path / "adapter",
        save_embedding_layers=True,
        **{"target_modules": ATTENTION, **config},
    )
    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        assert "base_model.model.lm_head.weight" in file.keys()  # noqa: SIM118 - it is no mapping
    assert_equals_peft(checkpoint, adapter, tmp_path / "store")


def test_notes_of_other_programs(llama: Path, tmp_path: Path) -> None:
    adapter = write_adapter(llama, tmp_path / "adapter", target_modules=ATTENTION)
    edit_config(adapter, unsloth_version="2024.8", created_by="a trainer")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unexpected keyword arguments")
        assert_equals_peft(llama, adapter, tmp_path / "store")


def test_names_without_pefts_prefix(llama: Path, tmp_path: Path) -> None:
    """transformers takes them; PEFT's own loader leaves them out."""
    adapter = write_adapter(llama, tmp_path / "adapter", target_modules=ATTENTION)
    with_prefix = peft_logits(llama, adapter, prompts())
    edit_tensors(adapter, lambda t: {k.removeprefix("base_model.model."): v for k, v in t.items()})
    model = load_reference(llama)
    model.load_adapter(str(adapter))
    with torch.inference_mode():
        by_transformers = model(input_ids=prompts(), use_cache=False).logits
    served = Served(llama, tmp_path / "store")
    got = served.adapted(adapter, prompts())
    served.close()
    assert_close(got, by_transformers)
    assert_close(got, with_prefix)


def test_one_batch_of_every_rank_and_the_base(served: Served, llama: Path, tmp_path: Path) -> None:
    ids = prompts(batch=len(RANKS) + 2)
    adapters = [
        write_adapter(llama, tmp_path / str(r), r, r=r, lora_alpha=2, target_modules=ATTENTION)
        for r in RANKS
    ]
    slots = [served.acquire(served.register(adapter, str(adapter))) for adapter in adapters]
    got = served.logits(ids, [BASE_SLOT, *slots, BASE_SLOT])
    alone = [peft_logits(llama, adapter, ids[[i]]) for i, adapter in enumerate(adapters, 1)]
    base = peft_logits(llama, None, ids)
    assert_close(got, torch.cat([base[:1], *alone, base[-1:]]))
    assert (got - base)[1:-1].abs().amax(dim=(1, 2)).min() > EFFECT


def test_base_rows_are_bit_equal_beside_adapters(
    served: Served, llama: Path, tmp_path: Path
) -> None:
    ids = prompts(batch=3)
    adapter = write_adapter(llama, tmp_path / "a", target_modules="all-linear")
    slot = served.acquire(served.register(adapter))
    mixed = served.logits(ids, [BASE_SLOT, slot, BASE_SLOT])
    assert torch.equal(mixed[[0, 2]], served.base(ids)[[0, 2]])


FEATURES: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True, "r": 16, "lora_alpha": 16, "target_modules": ATTENTION},
    "no alpha to speak of": {"r": 4, "lora_alpha": 1, "target_modules": "all-linear"},
    "rank_pattern": {
        "rank_pattern": {"layers.0.self_attn.q_proj": 4, "^q_proj|k_proj": 3},
        "target_modules": ATTENTION,
    },
    "alpha_pattern": {
        "alpha_pattern": {"layers.1.*": 64, "o_proj": 1},
        "target_modules": ATTENTION,
    },
    "both patterns with rslora": {
        "use_rslora": True,
        "rank_pattern": {"v_proj": 2},
        "alpha_pattern": {"v_proj": 3},
        "target_modules": ATTENTION,
    },
    "regex": {"target_modules": r".*\.layers\.(0|2)\..*\.(q_proj|down_proj)"},
    "half of a fused pair, by a dotted name": {
        "target_modules": ["self_attn.q_proj", "mlp.gate_proj"]
    },
    "one whole name": {"target_modules": ["model.layers.1.self_attn.v_proj"]},
    "exclude_modules": {
        "target_modules": ATTENTION,
        "exclude_modules": ["layers.0.self_attn.q_proj"],
    },
    "exclude_modules by regex": {
        "target_modules": "all-linear",
        "exclude_modules": r".*\.(k_proj|up_proj)",
    },
    "layers_to_transform": {"target_modules": ATTENTION, "layers_to_transform": [0, 2]},
    "layers_pattern": {
        "target_modules": ATTENTION,
        "layers_to_transform": 1,
        "layers_pattern": "layers",
    },
    "layers_to_transform beside a name in full": {
        "target_modules": ["lm_head", "q_proj"],
        "layers_to_transform": [1],
    },
    "only names in full": {"target_modules": ["lm_head"], "layers_to_transform": [1]},
    "gaussian initialisation": {"init_lora_weights": "gaussian", "target_modules": ["q_proj"]},
    "dropout": {"lora_dropout": 0.5, "target_modules": ["q_proj"]},
    "fan_in_fan_out": {"fan_in_fan_out": True, "target_modules": ["o_proj", "down_proj"]},
    "embedding": {"target_modules": ["embed_tokens"]},
    "lm_head": {"target_modules": ["lm_head"]},
    "embedding, lm_head and rslora": {
        "target_modules": ["embed_tokens", "lm_head", "q_proj"],
        "use_rslora": True,
    },
}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("base", ["llama", "tied"])
@pytest.mark.parametrize("config", FEATURES.values(), ids=FEATURES.keys())
def test_every_feature(
    base: str, config: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    checkpoint = request.getfixturevalue(base)
    adapter = write_adapter(checkpoint, tmp_path / "adapter", **config)
    assert_equals_peft(checkpoint, adapter, tmp_path / "store")


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize("fan_in_fan_out", [True, False])
def test_transposed_base_weights(fan_in_fan_out: bool, tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=64, n_layer=2, n_head=4)
    base = tmp_path / "base"
    GPT2LMHeadModel(config).save_pretrained(base)
    adapter = write_adapter(
        base,
        tmp_path / "adapter",
        target_modules=["attn.c_proj", "c_fc"],  # square and not
        fan_in_fan_out=fan_in_fan_out,
    )
    assert_equals_peft(base, adapter, tmp_path / "store")


def test_rslora_acts_by_the_root_of_the_rank_more(
    served: Served, llama: Path, tmp_path: Path
) -> None:
    def delta(use_rslora: bool) -> torch.Tensor:
        config = {"r": 16, "lora_alpha": 16, "use_rslora": use_rslora}
        folder = tmp_path / str(use_rslora)
        write_adapter(llama, folder, target_modules=["lm_head"], **config)
        return served.adapted(folder, prompts()) - served.base(prompts())

    torch.testing.assert_close(delta(True), 4.0 * delta(False), atol=TOLERANCE, rtol=1e-3)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_bfloat16_is_as_close_to_float32_as_peft_is(architecture: str, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", architecture)
    adapter = write_adapter(base, tmp_path / "adapter", target_modules="all-linear")
    exact = peft_logits(base, adapter, prompts())
    peft_error = (peft_logits(base, adapter, prompts(), torch.bfloat16) - exact).abs().mean()
    served = Served(base, tmp_path / "store", dtype=torch.bfloat16)
    error = (served.adapted(adapter, prompts()) - exact).abs().mean()
    served.close()
    assert error < 1.5 * peft_error


def test_adapters_of_different_modules_in_one_batch(
    served: Served, llama: Path, tmp_path: Path
) -> None:
    ids = prompts(batch=4)
    folders = [
        write_adapter(llama, tmp_path / "wide", 1, target_modules="all-linear"),
        write_adapter(llama, tmp_path / "head", 2, target_modules=["lm_head", "embed_tokens"]),
        write_adapter(llama, tmp_path / "one", 3, target_modules=["v_proj"], layers_to_transform=1),
    ]
    slots = [served.acquire(served.register(folder)) for folder in folders]
    got = served.logits(ids, [*slots, BASE_SLOT])
    want = [peft_logits(llama, folder, ids[[row]]) for row, folder in enumerate(folders)]
    assert_close(got, torch.cat([*want, peft_logits(llama, None, ids[3:])]))


def test_an_activated_lora_acts_from_its_invocation_on(
    served: Served, llama: Path, tmp_path: Path
) -> None:
    invocation = [7, 8]
    ids = prompts(length=12)
    ids[0, [2, 3, 6, 7]] = torch.tensor(invocation * 2)
    config = {"alora_invocation_tokens": invocation, "target_modules": "all-linear"}
    adapter = write_adapter(llama, tmp_path / "adapter", **config)
    ref = served.register(adapter)
    assert served.manager.manifest(ref).invocation_tokens == invocation
    slot = served.acquire(ref)
    got = served.logits_by_token(ids, [BASE_SLOT] * 6 + [slot] * 6)
    assert_close(got, peft_logits(llama, adapter, ids))
    base = served.base(ids)
    assert torch.equal(got[:, :6], base[:, :6])
    assert (got - base)[:, 6:].abs().amax(dim=(0, 2)).min() > EFFECT
