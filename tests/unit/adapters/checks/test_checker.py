"""Adapters are judged in a process that can be ended, whatever their files hold."""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.checks.catalogue import TargetCatalogue, TargetKind, TargetModule
from loraplex.adapters.checks.checker import AdapterChecker
from loraplex.adapters.errors import AdapterRejected

WIDTH = 8
NAMES = [f"model.layers.{i}.self_attn.q_proj" for i in range(3)]


@pytest.fixture(scope="module")
def checker() -> Iterator[AdapterChecker]:
    modules = {name: TargetModule(name, TargetKind.LINEAR, WIDTH, WIDTH) for name in NAMES}
    checker = AdapterChecker(TargetCatalogue(modules, {"model.norm": False}), {})
    yield checker
    checker.close()


def write(folder: Path, header: dict[str, Any] | None = None, **config: Any) -> Path:
    """A folder with a sound adapter on every module, or with another header and config."""
    folder.mkdir(exist_ok=True)
    settings = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    tensors = {}
    for name in NAMES:
        for part, shape in (("A", [2, WIDTH]), ("B", [WIDTH, 2])):
            start = 64 * len(tensors)
            key = f"base_model.model.{name}.lora_{part}.weight"
            tensors[key] = {"dtype": "F32", "shape": shape, "data_offsets": [start, start + 64]}
    raw = json.dumps(tensors if header is None else header).encode()
    data = struct.pack("<Q", len(raw)) + raw + bytes(64 * 6 if header is None else 0)
    (folder / "adapter_model.safetensors").write_bytes(data)
    return folder


def faults(checker: AdapterChecker, folder: Path) -> list[str]:
    with pytest.raises(AdapterRejected) as caught:
        checker.plan(folder)
    return caught.value.faults


def test_a_plan_tells_where_everything_is(checker: AdapterChecker, tmp_path: Path) -> None:
    folder = write(tmp_path / "sound", lora_alpha=6)
    plan = checker.plan(folder)
    spans = [span for module in plan.modules for span in (module.a, module.b)]
    size = (folder / "adapter_model.safetensors").stat().st_size
    assert [module.name for module in plan.modules] == NAMES
    assert {(module.rank, module.scaling) for module in plan.modules} == {(2, 3.0)}
    assert [span.stop - size for span in spans] == [-320, -256, -192, -128, -64, 0]


@pytest.mark.parametrize(
    "config",
    [{"target_modules": r"((\w|\.)*)*!"}, {"exclude_modules": "(.*)" * 30 + "!"}],
    ids=["nested", "long"],
)
def test_an_expression_that_takes_for_ever_is_stopped(
    checker: AdapterChecker, tmp_path: Path, config: dict[str, str]
) -> None:
    (told,) = faults(checker, write(tmp_path / "costly", **config))
    assert "too long or too much memory" in told


def test_as_many_tensors_as_a_header_can_name_are_counted(
    checker: AdapterChecker, tmp_path: Path
) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    told = faults(checker, write(tmp_path / "many", {f"t{i}": entry for i in range(200_000)}))
    assert "and 199992 more" in "\n".join(told)
    assert len("".join(told)) < 2000


def test_a_fault_of_every_tensor_is_counted_beyond_the_first_fifty(
    checker: AdapterChecker, tmp_path: Path
) -> None:
    entry = {"dtype": "I8", "shape": [0], "data_offsets": [0, 0]}
    told = faults(checker, write(tmp_path / "bad", {f"t{i}": entry for i in range(70_000)}))
    assert (len(told), told[-1]) == (51, "and 69,950 more faults")


def test_the_next_adapter_is_judged_after_one_that_ended_the_judge(
    checker: AdapterChecker, tmp_path: Path
) -> None:
    folder = write(tmp_path / "sound")
    checker.plan(folder)
    os.kill(checker.process_id, 9)
    assert len(checker.plan(folder).modules) == 3
