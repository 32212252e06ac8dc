"""read_weights: one adapter's tensors on the host."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loraplex.adapters.checks.catalogue import TargetCatalogue, TargetKind, TargetModule
from loraplex.adapters.checks.plan import AdapterPlan
from loraplex.adapters.checks.safetensors_header import read_header
from loraplex.adapters.checks.tensors import make_plan
from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.weights import ReadWeights, read_weights

NAMES = ("layers.0.q_proj", "layers.0.v_proj")
BASE = TargetCatalogue(
    {
        **{name: TargetModule(name, TargetKind.LINEAR, 5, 3) for name in NAMES},
        "lm_head": TargetModule("lm_head", TargetKind.LM_HEAD, 5, 7),
    },
    {},
)
HEAD = torch.arange(35.0).view(7, 5)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {
        f"base_model.model.{name}.lora_{matrix}.weight": torch.randn(shape)
        for name in NAMES
        for matrix, shape in (("A", (2, 5)), ("B", (3, 2)))
    }


def plan_of(path: Path) -> AdapterPlan:
    manifest = AdapterManifest(rank=2, alpha=1.0, target_modules=("q_proj", "v_proj"))
    size = path.stat().st_size
    with path.open("rb") as file:
        spans = read_header(file, size)
    return make_plan(spans, size, manifest, BASE.resolve(manifest), BASE)


def read(path: Path, plan: AdapterPlan | None = None) -> ReadWeights:
    with path.open("rb") as file:
        return read_weights(file, plan or plan_of(path), torch.bfloat16, lambda name: HEAD)


def test_an_adapter_is_read_into_one_piece_of_memory_in_the_engines_dtype(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "adapter.safetensors")

    weights = read(tmp_path / "adapter.safetensors").weights

    assert weights.num_bytes == 2 * 2 * (2 * 5 + 3 * 2)
    assert len({m.a.untyped_storage().data_ptr() for m in weights.modules.values()}) == 1
    for name, module in weights.modules.items():
        prefix = f"base_model.model.{name}"
        assert torch.equal(module.a, tensors[f"{prefix}.lora_A.weight"].bfloat16())
        assert torch.equal(module.b, tensors[f"{prefix}.lora_B.weight"].bfloat16())
        assert module.scaling == 0.5


def test_a_copy_of_the_base_is_compared_and_not_kept(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    paths = [tmp_path / "same", tmp_path / "other"]
    for path, head in zip(paths, (HEAD, HEAD + 1), strict=True):
        save_file({**tensors, "base_model.model.lm_head.weight": head}, path)

    same, other = map(read, paths)

    assert (same.faults, same.weights.modules.keys()) == ([], set(NAMES))
    assert "lm_head.weight' differs from the base model's weight" in other.faults[0]


def test_the_digest_is_that_of_the_whole_file(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "adapter.safetensors"
    save_file(tensors, path)
    assert read(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_that_was_cut_after_its_check_is_refused(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "adapter.safetensors"
    save_file(tensors, path)
    plan = plan_of(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(AdapterRejected, match="cut short"):
        read(path, plan)
