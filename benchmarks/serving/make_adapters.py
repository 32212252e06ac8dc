"""Random LoRA adapters for a checkpoint, in PEFT's format: all seven projections, fixed seeds.

    python benchmarks/serving/make_adapters.py MODEL OUT --count 16 --rank 16

Not trained, but with a non-zero B: they change the output and cost what a trained adapter costs.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
B_DEVIATION = 0.02


def projection_shapes(model: Path) -> dict[str, tuple[int, int]]:
    """Module name -> (out features, in features) of every projection of the checkpoint."""
    shapes = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (not a dict)
                name = key.removesuffix(".weight")
                if name.rpartition(".")[2] in PROJECTIONS and key != name:
                    out_features, in_features = tensors.get_slice(key).get_shape()
                    shapes[name] = (out_features, in_features)
    return shapes


def random_weights(
    shapes: dict[str, tuple[int, int]], rank: int, seed: int
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, (out_features, in_features) in shapes.items():
        a = torch.randn(rank, in_features, generator=generator) * in_features**-0.5
        b = torch.randn(out_features, rank, generator=generator) * B_DEVIATION
        weights[f"base_model.model.{name}.lora_A.weight"] = a.bfloat16()
        weights[f"base_model.model.{name}.lora_B.weight"] = b.bfloat16()
    return weights


def make_adapters(model: Path, out: Path, count: int, rank: int = 16) -> dict[str, Path]:
    """Writes a000, a001, … below `out`; -> name to folder."""
    shapes = projection_shapes(model)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.resolve().name,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(PROJECTIONS),
    }
    folders = {f"a{index:03d}": out / f"a{index:03d}" for index in range(count)}
    for seed, folder in enumerate(folders.values()):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
        save_file(random_weights(shapes, rank, seed), folder / "adapter_model.safetensors")
    return folders


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    for name, folder in make_adapters(**vars(options)).items():
        print(name, folder)


if __name__ == "__main__":
    main()
