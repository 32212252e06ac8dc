"""Tiny random checkpoints of every architecture that we claim, made by transformers itself."""

from pathlib import Path
from typing import Any

import torch
from support.models.tokenizers import write_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 320
WINDOW = 12  # tokens; shorter than the prompts of the tests
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.2,  # far from uniform, so that a wrong key or position shows
}
_WINDOWED = {"sliding_window": WINDOW}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {**_WINDOWED, "tie_word_embeddings": False},
    "qwen2": {**_WINDOWED, "use_sliding_window": True, **_ALTERNATING},
    "qwen3": {"head_dim": 24},
    "gemma2": {
        **_WINDOWED,
        **_ALTERNATING,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
    },
    "gemma3_text": {
        **_WINDOWED,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
    },
    "phi3": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "granite": {
        "embedding_multiplier": 4.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 1, 0], **_WINDOWED},
    "qwen3_moe": {
        "head_dim": 16,
        "moe_intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        **_WINDOWED,
        **_ALTERNATING,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def write_checkpoint(folder: Path, architecture: str, seed: int = 0, **overrides: Any) -> Path:
    """A float32 checkpoint with a small real tokenizer beside it."""
    torch.manual_seed(seed)
    settings = {**_COMMON, **ARCHITECTURES[architecture], **overrides}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(architecture, **settings), dtype=torch.float32
    )
    _fill(model, seed)
    model.save_pretrained(folder)
    return write_tokenizer(folder, vocab_size=VOCAB_SIZE)


def load_reference(folder: Path) -> PreTrainedModel:
    """Plain transformers in float32: the oracle."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@torch.no_grad()
def _fill(model: PreTrainedModel, seed: int) -> None:
    """Randomises what transformers initialises to a constant (biases, norms, sinks)."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
