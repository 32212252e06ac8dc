"""A tiny config of any causal language model of transformers, from the defaults of its class."""

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 320
WINDOW = 8  # tokens; shorter than the prompts of the tests
MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

_WIDTH = dict.fromkeys(
    ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 32
)
_INNER = dict.fromkeys(
    ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "decoder_ffn_dim"), 48
)
_DEPTH = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"), 3
)
_HEADS = dict.fromkeys(
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4
)
_LENGTH = dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 64)
_EXPERTS = {
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "v_head_dim": 8}
_TINY: dict[str, Any] = {
    **_WIDTH,
    **_INNER,
    **_DEPTH,
    **_HEADS,
    **_LENGTH,
    **_EXPERTS,
    **_LATENT,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "qk_rope_head_dim": 8,
    "rotary_dim": 8,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "floor_scale": WINDOW,
    "attention_window": WINDOW,
    "ssm_state_size": 8,
    "mamba_num_heads": 4,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "initializer_range": 0.2,  # far from uniform, so that a wrong key or position shows
}
_ONLY_WHERE_SET = ("sliding_window", "n_inner", "attention_chunk_size")
_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type")
_OWN: dict[str, dict[str, Any]] = {  # what a class needs beyond that
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
}


def tiny_config(model_type: str) -> PretrainedConfig:
    """Three layers of width 32, with every kind of layer that the class has by default.

    Raises:
        Exception: the class's own checks refuse such sizes.
    """
    return _tiny(CONFIG_MAPPING[model_type], _OWN.get(model_type, {}))


def _tiny(kind: type[PretrainedConfig], own: dict[str, Any]) -> PretrainedConfig:
    default = kind()
    known = default.to_dict()
    settings = {
        name: value
        for name, value in _TINY.items()
        if name in known and not (known[name] is None and name in _ONLY_WHERE_SET)
    }
    for name in _LISTS:
        if isinstance(known.get(name), list):
            settings[name] = (list(dict.fromkeys(known[name])) + known[name])[:3]
    for name in kind.sub_configs or {}:
        if isinstance(known.get(name), dict):
            settings[name] = _tiny(type(getattr(default, name)), {}).to_dict()
    if "kv_lora_rank" in known:  # every head has keys of its own, as wide as their parts together
        settings.pop("head_dim", None)
        settings["num_key_value_heads"] = 4
    return kind(**settings | own)
