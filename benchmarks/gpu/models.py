"""Random Llama models and adapters on disk, as the engine and PEFT load them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu.case import Machine
from safetensors.torch import save_file
from serving.make_adapters import PROJECTIONS, projection_shapes, random_weights
from support.models.tokenizers import write_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig


@dataclass(frozen=True)
class Size:
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    dtype: torch.dtype
    spread: float = 0.02  # of the weights; a large one makes the most likely token plain
    context: int = 2048  # tokens


# The shape of Llama 3.2 1B.
ONE_BILLION = Size(2048, 8192, 16, 32, 8, 128256, torch.bfloat16)
# A quarter of the layers of Llama 3.1 8B: 4.5 GB.
QUARTER_OF_EIGHT_BILLION = Size(4096, 14336, 8, 32, 8, 128256, torch.bfloat16, context=33 * 1024)
SMALL = Size(256, 512, 4, 8, 2, 1024, torch.float32, spread=0.2)
TINY = Size(32, 48, 2, 4, 2, 400, torch.float32, spread=0.2)


def write_model(folder: Path, size: Size, machine: Machine) -> Path:
    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        vocab_size=size.vocabulary,
        max_position_embeddings=size.context,
        initializer_range=size.spread,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    with torch.device(machine.device):
        model = AutoModelForCausalLM.from_config(config, dtype=size.dtype)
    model.save_pretrained(folder)
    return write_tokenizer(folder)


def write_adapters(model: Path, out: Path, ranks: Sequence[int], b_scale: float) -> list[Path]:
    """On all seven projections, each of its own rank; B is so many times as large as usual."""
    shapes = projection_shapes(model)
    folders = []
    for seed, rank in enumerate(ranks):
        folder = out / f"a{seed:03d}"
        folder.mkdir(parents=True)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": model.name,
            "r": rank,
            "lora_alpha": 2 * rank,
            "target_modules": list(PROJECTIONS),
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))
        weights = random_weights(shapes, rank, seed)
        for name, weight in weights.items():
            if "lora_B" in name:
                weight.mul_(b_scale)
        save_file(weights, folder / "adapter_model.safetensors")
        folders.append(folder)
    return folders
