"""read_weights: one adapter's tensors on the host."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from loraplex.adapters.safetensors_file import open_safetensors
from loraplex.adapters.targets import AdapterTarget, TargetKind, TargetModule
from loraplex.adapters.weights import read_weights


def test_an_adapter_is_read_into_one_piece_of_memory_in_the_engines_dtype(tmp_path: Path) -> None:
    names = ("layers.0.q_proj", "layers.0.v_proj")
    tensors = {
        f"base_model.model.{name}.lora_{matrix}.weight": torch.randn(shape)
        for name in names
        for matrix, shape in (("A", (2, 5)), ("B", (3, 2)))
    }
    save_file(tensors, tmp_path / "adapter.safetensors")
    targets = {
        name: AdapterTarget(TargetModule(name, TargetKind.LINEAR, 5, 3), rank=2, scaling=0.5)
        for name in names
    }

    weights = read_weights(
        open_safetensors(tmp_path / "adapter.safetensors"),
        targets,
        torch.bfloat16,
        lambda name: torch.empty(0),
    )

    assert weights.num_bytes == 2 * 2 * (2 * 5 + 3 * 2)
    assert len({m.a.untyped_storage().data_ptr() for m in weights.modules.values()}) == 1
    for name, module in weights.modules.items():
        prefix = f"base_model.model.{name}"
        assert torch.equal(module.a, tensors[f"{prefix}.lora_A.weight"].bfloat16())
        assert torch.equal(module.b, tensors[f"{prefix}.lora_B.weight"].bfloat16())
        assert module.scaling == 0.5
