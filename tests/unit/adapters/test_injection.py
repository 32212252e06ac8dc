"""inject_lora: what becomes of a model, and what a slot then holds."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.models.adapters import PEFT_NOISE, Served, write_adapter
from support.models.architectures import VOCAB_SIZE, load_reference, write_checkpoint

from loraplex.adapters.layers import FusedLinear, FusedMember, LoRALinear

pytestmark = PEFT_NOISE

IDS = torch.arange(5, 14)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "base"
    return write_checkpoint(folder, "llama", tie_word_embeddings=True)


@pytest.fixture
def served(base: Path, tmp_path: Path) -> Iterator[Served]:
    served = Served(base, tmp_path / "store", num_slots=2)
    yield served
    served.close()


def test_projections_that_share_an_input_are_one_linear(served: Served) -> None:
    attention = served.model.get_submodule("model.layers.0.self_attn")
    assert isinstance(attention.q_proj, FusedMember)
    assert isinstance(attention.qkv_proj, FusedLinear)
    assert attention.qkv_proj.weight.shape == (64 + 32 + 32, 64)
    assert isinstance(attention.o_proj, LoRALinear)


def test_the_weights_are_there_once(base: Path, served: Served) -> None:
    def size(model: torch.nn.Module) -> int:
        return sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())

    assert size(served.model) == size(load_reference(base))


def test_lm_head_and_embedding_stay_tied(served: Served) -> None:
    lm_head = served.model.get_output_embeddings()
    embedding = served.model.get_input_embeddings()
    assert lm_head.weight.data_ptr() == embedding.weight.data_ptr()


def hidden_states(served: Served, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The input of layer 0, and the logits."""
    seen: list[torch.Tensor] = []
    layer = served.model.get_submodule("model.layers.0")
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    logits = served.logits(IDS, [slot])
    hook.remove()
    return seen[0], logits


def test_lora_on_a_tied_lm_head_leaves_the_embedding_alone(
    base: Path, served: Served, tmp_path: Path
) -> None:
    embedded, logits = hidden_states(served, -1)
    adapter = write_adapter(base, tmp_path / "adapter", target_modules=["lm_head"])
    slot = served.acquire(served.register(adapter))
    embedded_with, logits_with = hidden_states(served, slot)
    assert torch.equal(embedded_with, embedded)
    assert (logits_with - logits).abs().max() > 0.1


def test_lora_on_a_tied_embedding_leaves_lm_head_alone(
    base: Path, served: Served, tmp_path: Path
) -> None:
    adapter = write_adapter(base, tmp_path / "adapter", target_modules=["embed_tokens"])
    slot = served.acquire(served.register(adapter))
    served.context.logits = None
    states = torch.randn(1, 9, 64)
    lm_head = served.model.get_output_embeddings()
    with torch.inference_mode():
        before = lm_head(states)
        served.logits(IDS, [slot])
        assert torch.equal(lm_head(states), before)


def test_layers_without_lora_stay_the_bases_bit_for_bit(
    base: Path, served: Served, tmp_path: Path
) -> None:
    adapter = write_adapter(
        base, tmp_path / "adapter", target_modules=["q_proj"], layers_to_transform=[2]
    )
    slot = served.acquire(served.register(adapter))
    with torch.inference_mode():
        base_states = served.model(input_ids=IDS, output_hidden_states=True).hidden_states
        served.logits(IDS, [slot])
        states = served.model(input_ids=IDS, output_hidden_states=True).hidden_states
    equal = [torch.equal(a, b) for a, b in zip(base_states, states, strict=True)]
    assert equal == [True, True, True, False]  # what goes into layers 0, 1, 2, and what comes out


def test_a_slot_taken_over_holds_nothing_of_the_last_adapter(
    base: Path, served: Served, tmp_path: Path
) -> None:
    wide = write_adapter(base, tmp_path / "wide", target_modules="all-linear")
    narrow = write_adapter(base, tmp_path / "narrow", target_modules=["q_proj"])
    alone = served.adapted(narrow, IDS)
    other = Served(base, tmp_path / "other", num_slots=1)
    ref = other.register(wide)
    other.acquire(ref)
    other.manager.release(ref)
    assert torch.equal(other.adapted(narrow, IDS), alone)
    other.close()


def test_cleared_slots_give_the_base_back(base: Path, served: Served, tmp_path: Path) -> None:
    before = served.base(IDS)
    adapter = write_adapter(base, tmp_path / "adapter", target_modules=["lm_head", "q_proj"])
    ref = served.register(adapter)
    slot = served.acquire(ref)
    served.manager.release(ref)
    served.manager.unregister(ref)
    assert torch.equal(served.logits(IDS, [slot]), before)


def test_vocabulary_is_the_embeddings(served: Served) -> None:
    assert served.sites.catalogue.vocab_size == VOCAB_SIZE
