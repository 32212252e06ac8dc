"""What a model asks of attention is served exactly, or the model is refused by name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.engines import make_engine
from support.models.architectures import write_checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from loraplex.engine.errors import ConfigRefused, UnsupportedModel
from loraplex.engine.model.checkpoint import read_weights
from loraplex.engine.model.loader import read_config
from loraplex.engine.model.masks import MaskProbe
from loraplex.engine.model.probe import AttentionProbe, probe_layers

LONGEST = 64
Forward = Callable[..., Any]


def probe(folder: Path, **overrides: Any) -> tuple[PreTrainedModel, AttentionProbe]:
    write_checkpoint(folder, "llama", **overrides)
    cpu = torch.device("cpu")
    model = read_weights(folder, read_config(folder), torch.float32, cpu)
    with torch.inference_mode():
        return model, probe_layers(model, LONGEST)


def window_of(function: Any, longest: int = LONGEST) -> int | None:
    masks = MaskProbe(longest)
    mask = masks(mask_function=function, batch_size=1, q_length=4, kv_length=4, dtype=torch.float32)
    return masks.window(mask, None)


def test_a_causal_mask_has_no_window() -> None:
    assert window_of(causal_mask_function) is None


@pytest.mark.parametrize("window", [1, 3, 8, LONGEST - 1])
def test_a_sliding_mask_has_its_window_though_the_pass_is_shorter(window: int) -> None:
    assert window_of(sliding_window_causal_mask_function(window)) == window


@pytest.mark.parametrize("window", [LONGEST, 4096])
def test_a_window_that_nothing_can_leave_is_none(window: int) -> None:
    assert window_of(sliding_window_causal_mask_function(window)) is None


@pytest.mark.parametrize("chunk", [2, 8, 32, 60])
def test_a_chunked_mask_is_refused(chunk: int) -> None:
    with pytest.raises(UnsupportedModel, match="neither causal nor a sliding window"):
        window_of(chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64)))


def test_chunks_that_nothing_can_leave_are_causal() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    assert window_of(chunked_causal_mask_function(LONGEST, zero)) is None


def test_a_mask_that_shows_what_comes_later_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="neither causal nor a sliding window"):
        window_of(bidirectional_mask_function)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_that_the_model_made_itself_is_looked_at(dtype: torch.dtype) -> None:
    causal = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    shown = {torch.bool: causal, torch.float32: torch.zeros(4, 4).masked_fill(~causal, -1e9)}
    skewed = {torch.bool: causal.flip(-1), torch.float32: 0.5 * shown[torch.float32] - 1}

    assert MaskProbe(LONGEST).window(shown[dtype], 4) == 4
    with pytest.raises(UnsupportedModel, match="attention mask of its own"):
        MaskProbe(LONGEST).window(skewed[dtype], None)


def test_the_model_serves_by_our_attention_after_the_probe(tmp_path: Path) -> None:
    model, found = probe(tmp_path)

    assert model.config._attn_implementation == "loraplex_paged"
    assert [found.layers[i].state.window for i in range(3)] == [None] * 3


def test_the_dry_forward_gives_what_transformers_gives(tmp_path: Path) -> None:
    _, found = probe(tmp_path)
    reference = found.reference
    assert reference is not None

    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        want = plain(reference.token_ids).logits[:, -reference.logits.shape[1] :]

    torch.testing.assert_close(reference.logits, want)


def change_attention(monkeypatch: pytest.MonkeyPatch, change: Callable[[Forward], Forward]) -> None:
    monkeypatch.setattr(LlamaAttention, "forward", change(LlamaAttention.forward))


def with_option(**options: Any) -> Callable[[Forward], Forward]:
    return lambda forward: lambda self, *args, **named: forward(self, *args, **named, **options)


def twice(forward: Forward) -> Forward:
    def called_twice(self: Any, *args: Any, **named: Any) -> Any:
        forward(self, *args, **named)
        return forward(self, *args, **named)

    return called_twice


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_option(position_bias=torch.ones(1)), "layer 0 calls attention with position_bias"),
        (with_option(logit_scale=2.0), "layer 0 calls attention with logit_scale"),
        (with_option(is_causal=False), "layer 0 attends in both directions"),
        (twice, "layer 0 calls attention more than once"),
    ],
)
def test_attention_that_we_do_not_compute_is_refused_by_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Forward], Forward],
    said: str,
) -> None:
    change_attention(monkeypatch, change)

    with pytest.raises(UnsupportedModel, match=f"llama is not supported: {said}"):
        probe(tmp_path)


def test_options_that_ask_for_nothing_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_attention(monkeypatch, with_option(position_bias=None, output_attentions=False))

    assert len(probe(tmp_path)[1].layers) == 3


def test_a_model_without_positions_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = probe(tmp_path)

    def forward(input_ids: Any, **named: Any) -> None:
        raise AssertionError("it is not even run")

    monkeypatch.setattr(model, "forward", forward)
    with pytest.raises(UnsupportedModel, match="takes no position_ids"):
        probe_layers(model, LONGEST)


def test_a_checkpoint_that_computes_nothing_finite_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_attention(
        monkeypatch,
        lambda forward: (
            lambda self, hidden_states, **named: forward(self, hidden_states * torch.nan, **named)
        ),
    )

    with pytest.raises(UnsupportedModel, match="logits are not finite"):
        probe(tmp_path)


def test_logits_up_to_rounding_are_accepted_and_others_refused(tmp_path: Path) -> None:
    _, found = probe(tmp_path)
    reference = found.reference
    assert reference is not None
    ours = reference.logits.flatten(0, 1)

    reference.compare(ours * (1 + 1e-4))
    half = replace(reference, dtype=torch.bfloat16)
    half.compare(ours + 0.1 * ours.std() * torch.randn_like(ours))

    second_alone_wrong = torch.cat([ours[:2], ours[2:].roll(1, -1)])
    for strict in (reference, half):
        with pytest.raises(UnsupportedModel, match="differ from those of transformers by"):
            strict.compare(second_alone_wrong)


def test_a_model_that_mixes_tokens_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a state space does beside attention: the second sequence sees the first one's tokens."""

    def blurred(forward: Forward) -> Forward:
        def mixing(self: Any, hidden_states: Any, **named: Any) -> Any:
            return forward(self, hidden_states + hidden_states.cumsum(1), **named)

        return mixing

    change_attention(monkeypatch, blurred)
    write_checkpoint(tmp_path / "m", "llama")

    with pytest.raises(UnsupportedModel, match="differ from those of transformers"):
        make_engine(tmp_path / "m", tmp_path / "store")


def test_a_temperature_by_place_is_refused_where_it_would_act(tmp_path: Path) -> None:
    tuning = {"attn_temperature_tuning": True, "floor_scale": 64}
    folder = write_checkpoint(tmp_path / "m", "llama", **tuning)

    with pytest.raises(ConfigRefused, match="--max-model-len 63 or less"):
        make_engine(folder, tmp_path / "store")

    make_engine(folder, tmp_path / "store", max_model_len=63).close()
