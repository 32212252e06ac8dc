"""Folders that must not become adapters: each is refused for its own reason, and leaves nothing."""

import json
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.adapters import (
    PEFT_NOISE,
    Served,
    Tensors,
    edit_config,
    edit_tensors,
    write_adapter,
)
from support.models.architectures import VOCAB_SIZE, write_checkpoint

from loraplex.adapters.errors import AdapterRejected

pytestmark = PEFT_NOISE

WEIGHTS = "adapter_model.safetensors"
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
EMBEDDING = "base_model.model.model.embed_tokens"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "base", "llama")


@pytest.fixture(scope="module")
def served(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(base, tmp_path_factory.mktemp("store"))
    yield served
    served.close()


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """A sound one: q_proj and v_proj of three layers."""
    return write_adapter(base, tmp_path / "adapter", r=4, target_modules=["q_proj", "v_proj"])


def refused(served: Served, folder: Path) -> str:
    """Every fault of a folder that is not accepted."""
    with pytest.raises(AdapterRejected) as caught:
        served.register(folder)
    return "\n".join(caught.value.faults)


def set_value(name: str, value: float) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        tensors[name].view(-1)[3] = value
        return tensors

    return change


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): t for name, t in tensors.items()}


def added(**extra: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, **extra}


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: t for name, t in tensors.items() if part not in name}


def scalar(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


TAMPERED: dict[str, tuple[Callable[[Tensors], Tensors], list[str]]] = {
    "wrong prefix": (
        renamed("base_model.model.model.", "base_model.model.language_model.model."),
        ["0 of 6 modules matched", "language_model", "without their tensors"],
    ),
    "with and without the prefix": (
        lambda t: {
            **t,
            **{name.removeprefix("base_model.model."): x.clone() for name, x in t.items()},
        },
        ["twice", "model.layers.0"],
    ),
    "another prefix": (renamed("base_model.model.", "model.model."), ["0 of 6 modules matched"]),
    "another format": (renamed("lora_A.weight", "lora_down"), ["0 of 6 modules matched"]),
    "half of the modules": (without("v_proj"), ["3 of 6 modules matched", "v_proj"]),
    "one tensor missing": (without(f"{Q0[17:]}.lora_B"), ["5 of 6 modules matched", Q0[17:]]),
    "a module of another base": (
        renamed("layers.2", "layers.7"),
        ["4 of 6 modules matched", "layers.7", "layers.2"],
    ),
    "experts": (
        added(**{"base_model.model.model.layers.0.mlp.experts.0.up.lora_A.weight": scalar(4, 64)}),
        ["experts.0"],
    ),
    "wide A": (
        lambda t: {**t, f"{Q0}.lora_A.weight": scalar(4, 65)},
        [f"{Q0}.lora_A.weight", "[4, 64]", "[4, 65]"],
    ),
    "another rank than the config's": (
        lambda t: {**t, f"{Q0}.lora_A.weight": scalar(8, 64), f"{Q0}.lora_B.weight": scalar(64, 8)},
        [f"{Q0}.lora_A.weight", f"{Q0}.lora_B.weight", "rank 4"],
    ),
    "A of one dimension": (lambda t: {**t, f"{Q0}.lora_A.weight": scalar(256)}, ["[256]"]),
    "DoRA vectors without its flag": (
        added(**{f"{Q0}.lora_magnitude_vector": scalar(64)}),
        ["DoRA", "lora_magnitude_vector"],
    ),
    "a bias of B without its flag": (
        added(**{f"{Q0}.lora_B.bias": scalar(64)}),
        ["bias in LoRA B"],
    ),
    "a full lm_head": (
        added(**{"base_model.model.lm_head.weight": scalar(VOCAB_SIZE, 64)}),
        ["modules_to_save", "base_model.model.lm_head.weight"],
    ),
    "a full norm": (
        added(**{"base_model.model.model.norm.weight": scalar(64)}),
        ["modules_to_save", "base_model.model.model.norm.weight"],
    ),
    "integers": (
        lambda t: {**t, f"{Q0}.lora_A.weight": torch.ones(4, 64, dtype=torch.int64)},
        ["I64", f"{Q0}.lora_A.weight"],
    ),
    "one NaN": (
        set_value(f"{Q0}.lora_B.weight", float("nan")),
        [f"{Q0}.lora_B.weight", "1 values"],
    ),
    "one infinity": (set_value(f"{Q0}.lora_A.weight", float("inf")), [f"{Q0}.lora_A.weight"]),
}


@pytest.mark.parametrize(("change", "named"), TAMPERED.values(), ids=TAMPERED.keys())
def test_tensors_that_do_not_fit_are_refused_by_name(
    change: Callable[[Tensors], Tensors], named: list[str], served: Served, adapter: Path
) -> None:
    told = refused(served, edit_tensors(adapter, change))
    assert [part for part in named if part not in told] == []


def cut(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-7])


def prefix(size: int) -> Callable[[Path], None]:
    """A file that claims a header of `size` bytes."""
    return lambda folder: _write(folder, size.to_bytes(8, "little") + b"{}")


def header(**entries: Any) -> Callable[[Path], None]:
    raw = json.dumps(entries).encode()
    return lambda folder: _write(folder, len(raw).to_bytes(8, "little") + raw + bytes(64))


def _write(folder: Path, data: bytes) -> None:
    (folder / WEIGHTS).write_bytes(data)


def only_a_pickle(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def shards(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model-00001-of-00002.safetensors")


def a_link_to_nowhere(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(folder / "gone")


def a_link(name: str) -> Callable[[Path], None]:
    def link(folder: Path) -> None:
        (folder / name).rename(folder / "target")
        (folder / name).symlink_to(folder / "target")

    return link


def a_linked_tokenizer(folder: Path) -> None:
    (folder / "added_tokens.json").symlink_to("/etc/passwd")


def a_folder(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def a_socket(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(folder, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{here}/{WEIGHTS}")
        os.close(here)


def a_fifo(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def huge(folder: Path) -> None:
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate(1 << 40)  # sparse


def upper_case(folder: Path) -> None:
    (folder / "adapter_config.json").rename(folder / "ADAPTER_CONFIG.JSON")


def deeper(folder: Path) -> None:
    (folder / "checkpoint-7").mkdir()
    for name in ("adapter_config.json", WEIGHTS):
        (folder / name).rename(folder / "checkpoint-7" / name)


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut short": (cut, "do not fill"),
    "empty": (lambda folder: _write(folder, b""), "not safetensors"),
    "text": (lambda folder: _write(folder, b"hello world, no tensors"), "not safetensors"),
    "a header of 2^60 bytes": (prefix(1 << 60), "not safetensors"),
    "a header longer than the file": (prefix(1000), "not safetensors"),
    "a header that is no JSON": (prefix(1), "no valid header"),
    "an entry that is none": (header(a=7), "no valid header"),
    "a negative shape": (header(a=entry("F32", [-4, -4], 0, 64)), "no valid header"),
    "a shape that overflows": (header(a=entry("F32", [1 << 40] * 4, 0, 64)), "needs"),
    "data beyond the end": (header(a=entry("F32", [64], 0, 256)), "do not fill"),
    "overlapping data": (
        header(a=entry("F32", [16], 0, 64), b=entry("F32", [16], 0, 64)),
        "do not fill",
    ),
    "only a pickle": (only_a_pickle, "adapter_model.bin is a pickle"),
    "shards": (shards, "several files"),
    "no weights": (
        lambda folder: (folder / WEIGHTS).unlink(),
        "adapter_model.safetensors is missing",
    ),
    "a link to nowhere": (a_link_to_nowhere, "adapter_model.safetensors is a symbolic link"),
    "a link to weights": (a_link(WEIGHTS), "adapter_model.safetensors is a symbolic link"),
    "a link to a config": (a_link("adapter_config.json"), "adapter_config.json is a symbolic link"),
    "a link among the tokenizer files": (a_linked_tokenizer, "added_tokens.json is a symbolic"),
    "a pipe": (a_fifo, "adapter_model.safetensors is not a regular file"),
    "a folder for weights": (a_folder, "adapter_model.safetensors is not a regular file"),
    "a device": (a_socket, "adapter_model.safetensors cannot be read"),
    "a terabyte": (huge, "more than"),
    "no config": (
        lambda folder: (folder / "adapter_config.json").unlink(),
        "adapter_config.json is missing",
    ),
    "an upper-case config": (upper_case, "adapter_config.json is missing"),
    "a folder deeper": (deeper, "checkpoint-7"),
}


@pytest.mark.parametrize(("damage", "reason"), FILES.values(), ids=FILES.keys())
def test_damaged_files_are_refused_with_the_reason(
    damage: Callable[[Path], None], reason: str, served: Served, adapter: Path
) -> None:
    damage(adapter)
    assert reason in refused(served, adapter)


class _Trap:
    """A pickle that leaves a file behind when it is opened."""

    def __init__(self, sentinel: Path) -> None:
        self._sentinel = sentinel

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._sentinel),)


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("name", ["adapter_model.bin", WEIGHTS])
def test_a_pickle_is_never_opened_whatever_it_is_called(
    name: str, protocol: int, served: Served, adapter: Path, tmp_path: Path
) -> None:
    (adapter / WEIGHTS).unlink()
    trap = pickle.dumps(_Trap(tmp_path / "sentinel"), protocol=protocol)
    (adapter / name).write_bytes(trap)
    refused(served, adapter)
    assert not (tmp_path / "sentinel").exists()


def test_a_torch_file_called_safetensors_is_refused_as_a_pickle(
    served: Served, adapter: Path
) -> None:
    torch.save({"a": torch.ones(2)}, adapter / WEIGHTS)
    assert "a pickle" in refused(served, adapter)


def test_safetensors_are_used_where_a_pickle_lies_beside_them(
    served: Served, adapter: Path
) -> None:
    (adapter / "adapter_model.bin").write_bytes(b"\x80\x02 not even a pickle")
    assert served.manager.info(served.register(adapter)).num_modules == 6


@pytest.mark.parametrize("vectors", [True, False], ids=["with vectors", "without"])
def test_dora_is_refused_by_its_flag(vectors: bool, served: Served, adapter: Path) -> None:
    edit_config(adapter, use_dora=True)
    if vectors:
        edit_tensors(adapter, added(**{f"{Q0}.lora_magnitude_vector": scalar(64)}))
    assert "DoRA" in refused(served, adapter)


@pytest.mark.parametrize("rows", [VOCAB_SIZE, VOCAB_SIZE + 64])
def test_full_copies_are_refused(rows: int, served: Served, adapter: Path) -> None:
    edit_config(adapter, modules_to_save=["embed_tokens", "lm_head"])
    names = ("base_model.model.lm_head.weight", f"{EMBEDDING}.weight")
    edit_tensors(adapter, added(**{name: scalar(rows, 64) for name in names}))
    told = refused(served, adapter)
    assert [name for name in names if name not in told] == []


def test_full_copies_that_are_announced_must_be_there(served: Served, adapter: Path) -> None:
    edit_config(adapter, modules_to_save=["lm_head"])
    assert "modules_to_save names modules whose copies are not there" in refused(served, adapter)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("added_tokens.json", {"<new>": VOCAB_SIZE, "<old>": 5}),
        ("tokenizer_config.json", {"added_tokens_decoder": {VOCAB_SIZE: {"content": "<new>"}}}),
        ("tokenizer.json", {"added_tokens": [{"id": VOCAB_SIZE, "content": "<new>"}]}),
    ],
)
def test_tokens_beyond_the_vocabulary_are_refused_by_token_and_id(
    name: str, content: dict[str, Any], served: Served, adapter: Path
) -> None:
    (adapter / name).write_text(json.dumps(content))
    told = refused(served, adapter)
    assert f"<new> ({VOCAB_SIZE})" in told
    assert "<old>" not in told


def test_tokens_that_the_base_models_tokenizer_has_are_none_of_the_adapters(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    tokens = {"<image>": VOCAB_SIZE, "<known>": 7}
    (adapter / "added_tokens.json").write_text(json.dumps(tokens))
    served = Served(base, tmp_path / "store", added_tokens={"<image>": VOCAB_SIZE})
    assert served.manager.info(served.register(adapter)).num_modules == 6
    served.close()


def test_no_content_of_a_file_that_is_no_adapter_is_told(served: Served, adapter: Path) -> None:
    secret = b"12345678 and more"
    _write(adapter, secret)
    told = refused(served, adapter)
    assert str(int.from_bytes(secret[:8], "little")) not in told


def test_a_link_in_place_of_the_folder_is_refused(served: Served, adapter: Path) -> None:
    link = adapter.with_name("link")
    link.symlink_to(adapter)
    assert "the folder is a symbolic link" in refused(served, link)


@pytest.mark.parametrize(
    ("copy", "reason"),
    [
        (lambda base: base + 0.1, "differs from the base model's weight"),
        (lambda base: torch.cat([base, base[:64]]), f"[{VOCAB_SIZE + 64}, 64]"),
    ],
    ids=["changed", "resized"],
)
def test_another_embedding_under_an_adapted_one_is_refused(
    copy: Callable[[torch.Tensor], torch.Tensor],
    reason: str,
    served: Served,
    base: Path,
    tmp_path: Path,
) -> None:
    folder = write_adapter(base, tmp_path / "adapter", target_modules=["embed_tokens"])
    name = f"{EMBEDDING}.base_layer.weight"
    edit_tensors(folder, lambda tensors: {**tensors, name: copy(tensors[name])})
    told = refused(served, folder)
    assert reason in told
    assert name in told


def test_the_shapes_of_another_base_are_refused(served: Served, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "base", "llama", hidden_size=32)
    folder = write_adapter(other, tmp_path / "adapter", target_modules=["q_proj"])
    assert "must have shape [8, 64] (rank 8 by the config), got [8, 32]" in refused(served, folder)


def test_values_too_large_for_the_engine_are_refused(base: Path, adapter: Path) -> None:
    half = Served(base, adapter.parent / "store", dtype=torch.float16)
    edit_tensors(adapter, set_value(f"{Q0}.lora_A.weight", 7e4))
    told = refused(half, adapter)
    half.close()
    assert f"{Q0}.lora_A.weight' has 1 values too large for float16" in told


def multiplied(factor: float, part: str = "lora_") -> Callable[[Tensors], Tensors]:
    return lambda t: {name: x * factor if part in name else x for name, x in t.items()}


@pytest.mark.parametrize("targets", ["all-linear", ["embed_tokens"], ["lm_head"]])
def test_finite_weights_that_give_nothing_finite_are_refused(
    targets: str | list[str], served: Served, base: Path, tmp_path: Path
) -> None:
    folder = write_adapter(base, tmp_path / "adapter", target_modules=targets)
    told = refused(served, edit_tensors(folder, multiplied(1e38)))
    assert "nothing finite comes out of" in told


def test_one_module_that_gives_nothing_finite_is_named(served: Served, adapter: Path) -> None:
    told = refused(served, edit_tensors(adapter, multiplied(1e38, Q0[17:] + ".lora")))
    assert "nothing finite comes out of 'model.layers.0.self_attn.q_proj' for" in told


def test_large_weights_that_give_finite_numbers_are_accepted(served: Served, adapter: Path) -> None:
    edit_tensors(adapter, multiplied(1e6))
    assert served.manager.info(served.register(adapter)).num_modules == 6


def test_nothing_of_a_refused_adapter_is_kept(base: Path, adapter: Path, tmp_path: Path) -> None:
    served = Served(base, tmp_path / "store")
    refused(served, edit_tensors(adapter, set_value(f"{Q0}.lora_B.weight", float("nan"))))
    kept = [path for path in (tmp_path / "store").rglob("*") if path.name != ".lock"]
    served.close()
    assert kept == [tmp_path / "store" / "staging"]


def many_tensors(folder: Path) -> None:
    tensor = entry("F32", [0], 0, 0)
    header(**{f"t{i}": tensor for i in range(200_000)})(folder)
    data = (folder / WEIGHTS).read_bytes()
    _write(folder, data[:-64])


def a_large_config(folder: Path) -> None:
    edit_config(folder, note=["x"] * (4 << 20))


def many_faults(folder: Path) -> None:
    edit_config(folder, rank_pattern={f"m{i}": 0 for i in range(70_000)})


def a_costly_expression(folder: Path) -> None:
    edit_config(folder, target_modules=r"((\w|\.)*)*!")


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (many_tensors, "and 199992 more"),
        (a_large_config, "larger than"),
        (many_faults, "and 69,950 more faults"),
        (a_costly_expression, "too long or too much memory"),
    ],
)
def test_what_is_costly_to_judge_costs_the_engines_process_nothing(
    harm: Callable[[Path], None], reason: str, served: Served, adapter: Path
) -> None:
    harm(adapter)
    start = time.process_time()
    told = refused(served, adapter)
    assert reason in told
    assert time.process_time() - start < 0.4  # in this process it would be seconds
    assert len(told) < 10_000


def test_no_message_tells_a_path(served: Served, adapter: Path) -> None:
    for _, (damage, _) in FILES.items():
        folder = adapter.parent / "copy"
        folder.mkdir()
        for name in ("adapter_config.json", WEIGHTS):
            (folder / name).write_bytes((adapter / name).read_bytes())
        damage(folder)
        assert str(adapter.parent) not in refused(served, folder)
        folder.rename(adapter.parent / f"done-{os.urandom(4).hex()}")


def test_an_adapter_stored_in_another_float_type_is_accepted(served: Served, adapter: Path) -> None:
    tensors = load_file(adapter / WEIGHTS)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        save_file({name: t.to(dtype) for name, t in tensors.items()}, adapter / WEIGHTS)
        assert served.manager.info(served.register(adapter)).num_modules == 6
