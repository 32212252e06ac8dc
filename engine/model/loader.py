"""Loads a Hugging Face folder as a model: checks it, and chooses dtype, device and length."""

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import ConfigRefused, UnsupportedModel
from loraplex.engine.model.checkpoint import first_line, read_weights

_SAMPLE = 1 << 20  # bytes read at each end of a weights file for the revision


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    model: PreTrainedModel
    folder: Path
    device: torch.device
    dtype: torch.dtype
    revision: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]


def load_model(config: EngineConfig) -> LoadedModel:
    """Loads the model of a local folder for inference.

    Raises:
        UnsupportedModel: when the folder holds no decoder-only checkpoint that transformers knows,
            or one whose tensors are not exactly the model's.
        ConfigRefused: when a setting does not fit the model or the machine.
    """
    folder = Path(config.model)
    hf_config = read_config(folder)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, hf_config, device)
    max_model_len = choose_max_model_len(config.max_model_len, hf_config)
    _refuse_counted_positions(hf_config, max(max_model_len, config.max_num_batched_tokens))
    model = read_weights(folder, hf_config, dtype, device)
    nn.Module.to(model, device)
    nn.Module.eval(model)
    vocab_size = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    return LoadedModel(
        model=model,
        folder=folder,
        device=device,
        dtype=dtype,
        revision=revision(folder),
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=_eos_token_ids(model, vocab_size),
    )


def read_config(folder: Path) -> PretrainedConfig:
    """Returns the folder's config, if it describes a model that can be served.

    Raises:
        UnsupportedModel: saying what is missing or not supported.
    """
    if not (folder / "config.json").is_file():
        raise UnsupportedModel(f"{folder} is no Hugging Face model folder: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the checks of each model's config raise what they like
        message = f"cannot read {folder / 'config.json'}: {first_line(error)}"
        raise UnsupportedModel(message) from error
    if config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{config.model_type} is an encoder-decoder model; only decoder-only models are served"
        )
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedModel(f"{config.model_type} is no causal language model of transformers")
    return cast(PretrainedConfig, config)


def revision(folder: Path) -> str:
    """Returns a digest of the checkpoint: its config, and each weights file's name, size and both
    ends.

    The ends hold the table of tensors and some weights; reading all of a large model takes minutes.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE))
            file.seek(max(0, path.stat().st_size - _SAMPLE))
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def choose_device(name: str) -> torch.device:
    """Chooses the device; `auto` is CUDA if available.

    Raises:
        ConfigRefused: when CUDA is asked for and is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigRefused("device is cuda, but torch finds no CUDA device; use cpu or auto")
    return torch.device(name)


def choose_dtype(name: str, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """Chooses the dtype; `auto` is the checkpoint's own, as far as the device computes well in
    it."""
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    stored = config.get_text_config().dtype or config.dtype
    if not isinstance(stored, torch.dtype):
        return torch.float32
    if device.type == "cpu" and stored == torch.float16:
        return torch.bfloat16  # float16 arithmetic is slow, and overflows, on CPUs
    return torch.float32 if stored == torch.float64 else stored


def choose_max_model_len(asked: int | None, config: PretrainedConfig) -> int:
    """Chooses the maximum length in tokens; by default what the model's positions allow.

    Raises:
        ConfigRefused: when the model cannot do the length asked for.
    """
    text = config.get_text_config()
    known = getattr(text, "max_position_embeddings", None)
    if asked is None and known is None:
        raise ConfigRefused("the model's config names no maximum length; give --max-model-len")
    if asked is not None and known is not None and asked > known:
        raise ConfigRefused(f"max_model_len is {asked}, but the model's positions end at {known}")
    length = int(asked if asked is not None else cast(int, known))
    _refuse_length_dependent_rope(text, length)
    return length


def _refuse_length_dependent_rope(config: PretrainedConfig, length: int) -> None:
    """Refuses rotary embeddings that change for all rows when one row is long: no answer may depend
    on its neighbours."""
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type", "default")
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if kind in ("dynamic", "longrope") and original and length > original:
            raise ConfigRefused(
                f"this model's {kind} rotary embedding changes beyond {original} positions, which "
                "would make answers depend on their neighbours; give --max-model-len "
                f"{original} or less"
            )


def _refuse_counted_positions(config: PretrainedConfig, longest: int) -> None:
    """Refuses models that scale attention by a token's place in the batch beyond a certain place,
    which equals its position in one sequence only; `longest`: tokens of a sequence or a step."""
    text = config.get_text_config()
    first = getattr(text, "floor_scale", None)
    if getattr(text, "attn_temperature_tuning", False) and first and longest >= first:
        raise ConfigRefused(
            f"this model's attention temperature changes with a token's place from {first} on, "
            f"which is served below only; give --max-model-len {first - 1} or less, and not more "
            "as --max-num-batched-tokens"
        )


def _rope_parameters(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Returns the rotary settings: one for all layers, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]


def _eos_token_ids(model: PreTrainedModel, vocab_size: int) -> frozenset[int]:
    """Returns the end-of-sequence ids of the config and the generation config, without ids that the
    model can never sample."""
    found: set[int] = set()
    for config in (model.generation_config, model.config.get_text_config()):
        eos = getattr(config, "eos_token_id", None)
        found.update([eos] if isinstance(eos, int) else eos or [])
    unknown = sorted(token for token in found if not 0 <= token < vocab_size)
    if unknown:
        logger.warning("End tokens outside the vocabulary are left out: %s", unknown)
    return frozenset(found.difference(unknown))
