"""Reads a checkpoint's weights into transformers' model; every tensor is accounted for, or
refused."""

import re
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging
from transformers.utils.import_utils import is_accelerate_available

from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.model.probe import ATTENTION

# What the library says of its types changes with what else is imported.
transformers_logging: Any = logging
_AutoModel: Any = AutoModelForCausalLM

_SHOWN = 5  # tensors that a refusal names
_LONGEST = 300  # characters of a library's message that a refusal quotes


def read_weights(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Builds the model of a folder from its safetensors files.

    Raises:
        UnsupportedModel: the files cannot be read, or their tensors are not exactly the model's.
    """
    _refuse_adapter(folder)
    transformers_logging.disable_progress_bar()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        model, report = _AutoModel.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that the report names them all
            **_placement(device),
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the library raises whatever its parts meet in a bad checkpoint
        raise UnsupportedModel(_cannot_load(folder, config, error)) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    if getattr(model, "is_quantized", False):
        raise UnsupportedModel(_is_quantized(folder, config))
    faults = _faults(model, report)
    if faults:
        raise UnsupportedModel(f"{folder} does not fit its config.json: {'; '.join(faults)}")
    return cast(PreTrainedModel, model)


def first_line(error: Exception) -> str:
    """Returns a library's message as one line that fits into a sentence."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _refuse_adapter(folder: Path) -> None:
    """Refuses an adapter beside a model: transformers would silently merge it."""
    if (folder / "adapter_config.json").exists():
        raise UnsupportedModel(
            f"{folder} holds an adapter (adapter_config.json) beside the base model; move the "
            "adapter's files to a folder of their own and give that with --adapter"
        )


def _placement(device: torch.device) -> dict[str, Any]:
    """Returns where transformers puts each weight as it reads it; it needs `accelerate` for
    that."""
    if device.type == "cpu" or not is_accelerate_available():
        return {}
    return {"device_map": {"": device}}


def _is_quantized(folder: Path, config: PretrainedConfig) -> str:
    method = config.quantization_config.get("quant_method", "a method without a name")
    return (
        f"{folder} is quantized by {method}, which is not served; take the checkpoint in bfloat16 "
        "or float32"
    )


def _cannot_load(folder: Path, config: PretrainedConfig, error: Exception) -> str:
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (OSError, SafetensorError) as reason:
            return f"cannot read {path}: {first_line(reason)}; the file is cut short or damaged"
    if isinstance(getattr(config, "quantization_config", None), dict):
        return f"{_is_quantized(folder, config)}: {first_line(error)}"
    return f"cannot load the model in {folder}: {first_line(error)}"


def _faults(model: PreTrainedModel, report: dict[str, Any]) -> list[str]:
    """Returns what the checkpoint lacks, has in another shape, or has beyond what the model
    computes."""
    shapes = [
        f"{name} has shape {list(found)}, not {list(wanted)}"
        for name, found, wanted in sorted(report["mismatched_keys"])
    ]
    missing, left_over = sorted(report["missing_keys"]), _left_over(model, report)
    faults = []
    if missing:
        faults.append(f"{len(missing)} tensors are missing ({_listed(missing)})")
    if shapes:
        faults.append(f"{len(shapes)} tensors have another shape ({_listed(shapes)})")
    if left_over:
        faults.append(f"{len(left_over)} tensors belong to no part of it ({_listed(left_over)})")
    return faults


def _left_over(model: PreTrainedModel, report: dict[str, Any]) -> list[str]:
    """Returns tensors that are not read although the model has their module, or one of its kind.

    Other tensors belong to parts that this model lacks, such as an image encoder. Where tensors are
    missing as well, all count: their names may have a wrong prefix.
    """
    unexpected = sorted(report["unexpected_keys"])
    if report["missing_keys"]:
        return unexpected
    modules = {_pattern(name) for name, _ in model.named_modules()}
    return [name for name in unexpected if _pattern(name.rpartition(".")[0]) in modules]


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
