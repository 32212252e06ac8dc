"""The keys of PEFT's adapter_config.json: supported, harmless or refused, and how each is read."""

import re
from collections.abc import Mapping
from typing import Any

from loraplex.adapters.errors import listed, shown

READ = frozenset(
    {
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "modules_to_save",
        "layers_to_transform",
        "layers_pattern",
        "alora_invocation_tokens",
        "base_model_name_or_path",
    }
)

# These matter in training only, or describe the layout of base weights, which the delta does not
# depend on (fan_in_fan_out), or take effect through another key that is judged (the *_config ones
# through init_lora_weights, megatron_core through megatron_config).
HARMLESS = frozenset(
    {
        "auto_mapping",
        "corda_config",
        "eva_config",
        "fan_in_fan_out",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)

# What other programs note in a config. PEFT drops what it does not know, and none of these could
# name a way to compute.
INFORMATIONAL = re.compile(
    r"(\w+_)?(version|commit|git_hash|git_sha|comments?|descriptions?|notes?|authors?|license|tags"
    r"|date|timestamp|created|created_at|created_by|trained_by|url|library_name|framework)"
)

# An initialisation outside this list rewrites the base weights when PEFT loads the adapter.
KEEPS_BASE_WEIGHTS = (True, False, None, "gaussian", "orthogonal", "eva")

FEATURES = {
    "use_dora": "DoRA (use_dora)",
    "layer_replication": "repeated layers (layer_replication)",
    "trainable_token_indices": "trained token embeddings (trainable_token_indices)",
    "target_parameters": "LoRA on bare parameters (target_parameters)",
    "lora_bias": "a bias in LoRA B (lora_bias)",
    "ensure_weight_tying": "tied adapters (ensure_weight_tying)",
    "megatron_config": "Megatron layers (megatron_config)",
    "use_qalora": "QALoRA (use_qalora)",
    "use_bdlora": "block-diagonal LoRA (use_bdlora)",
    "arrow_config": "Arrow routing (arrow_config)",
    "kasa_config": "KaSA (kasa_config)",
    "velora_config": "VeLoRA (velora_config)",
    "monteclora_config": "Monte Carlo LoRA (monteclora_config)",
}


def unsupported(config: Mapping[str, Any]) -> list[str]:
    """Returns one fault for each feature in `config` that would change the result and is not
    supported."""
    faults = [f"{feature} is not supported" for key, feature in FEATURES.items() if config.get(key)]
    if config.get("peft_type") != "LORA":
        faults.append(f'peft_type must be "LORA", got {shown(config.get("peft_type"))}')
    if config.get("bias", "none") != "none":
        faults.append(f'bias must be "none", got {shown(config["bias"])}')
    initialisation = config.get("init_lora_weights")
    if initialisation not in KEEPS_BASE_WEIGHTS:
        faults.append(
            f"init_lora_weights {shown(initialisation)} changes the base weights; convert the "
            "adapter to a plain LoRA when saving it (path_initial_model_for_weight_conversion)"
        )
    known = READ | HARMLESS | FEATURES.keys() | {"peft_type", "bias", "init_lora_weights"}
    unknown = sorted(
        key
        for key, value in config.items()
        if value and key not in known and not _informs(key, value)
    )
    if unknown:
        faults.append(f"unknown settings: {listed(unknown)}")
    return faults


def _informs(key: str, value: object) -> bool:
    values = value if isinstance(value, list) else [value]
    is_plain = all(isinstance(x, str | int | float) and not isinstance(x, bool) for x in values)
    return is_plain and INFORMATIONAL.fullmatch(key) is not None


class ConfigReader:
    """Reads typed values from a config, and collects their faults in `faults`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.faults: list[str] = []

    def fault(self, key: str, allowed: str, value: object) -> None:
        self.faults.append(f"{key} must be {allowed}, got {shown(value)}")

    def flag(self, key: str) -> bool:
        value = self._config.get(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        self.fault(key, "true or false", value)
        return False

    def text(self, key: str, limit: int) -> str:
        value = self._config.get(key)
        if value is None or (isinstance(value, str) and len(value) <= limit):
            return value or ""
        self.fault(key, f"a text of at most {limit} characters", value)
        return ""

    def number(self, key: str, default: float, low: float, high: float) -> float:
        return self._number(key, self._config.get(key, default), low, high)

    def integer(self, key: str, default: int, low: int, high: int) -> int:
        return self._integer(key, self._config.get(key, default), low, high)

    def numbers(self, key: str, low: float, high: float) -> dict[str, float]:
        items = self._mapping(key).items()
        return {name: self._number(f"{key}[{shown(name)}]", x, low, high) for name, x in items}

    def integer_map(self, key: str, low: int, high: int) -> dict[str, int]:
        items = self._mapping(key).items()
        return {name: self._integer(f"{key}[{shown(name)}]", x, low, high) for name, x in items}

    def integers(self, key: str, high: int, count: int) -> list[int] | None:
        """Returns a list of integers from 0 to `high`; one integer counts as a list; None where
        absent."""
        value = self._config.get(key)
        if value is None:
            return None
        values = value if isinstance(value, list) else [value]
        if len(values) > count:
            self.fault(key, f"at most {count} integers", f"{len(values)} of them")
            return []
        return [self._integer(key, item, 0, high) for item in values]

    def names(self, key: str, count: int, limit: int) -> tuple[str, ...]:
        """Returns a list of non-empty texts; empty where absent."""
        value = self._config.get(key)
        if value is None:
            return ()
        fits = isinstance(value, list) and len(value) <= count
        if fits and all(isinstance(x, str) and 0 < len(x) <= limit for x in value):
            return tuple(value)
        self.fault(key, f"a list of at most {count} names of 1 to {limit} characters", value)
        return ()

    def is_text(self, key: str) -> bool:
        return isinstance(self._config.get(key), str)

    def _mapping(self, key: str) -> dict[str, Any]:
        value = self._config.get(key)
        if value is None or isinstance(value, dict):
            return value or {}
        self.fault(key, "an object", value)
        return {}

    def _integer(self, key: str, value: object, low: int, high: int) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        self.fault(key, f"an integer from {low} to {high}", value)
        return low

    def _number(self, key: str, value: object, low: float, high: float) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
            return float(value)
        self.fault(key, f"a number from {low:g} to {high:g}", value)
        return low
