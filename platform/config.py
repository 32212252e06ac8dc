"""Settings: the server's configuration; no other module reads the environment."""

import os
import secrets
import shlex
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from loraplex.adapters.manifest import Activation
from loraplex.engine.config import MAX_THREADS, EngineConfig, HangLimits, defaults
from loraplex.engine.sampling_params import MAX_SEED
from loraplex.platform.errors import SettingsRefused
from loraplex.platform.http.connections import ConnectionLimits
from loraplex.platform.setting_types import Bytes, Checkpoint, File, Folder, Key, ModelName, Origins

PREFIX = "LORAPLEX_"
MAPPINGS = {  # the settings with repeatable options, and the form of their values
    "adapters": "NAME=FOLDER",
    "base_prompts": "NAME=FILE",
    "adapter_activations": "ADAPTER=ACTIVATION",
    "adapter_base_prompts": "ADAPTER=BASE_PROMPT",
}

_ENGINE, _HANG_LIMITS = defaults(EngineConfig), defaults(HangLimits)


class Settings(BaseSettings):
    """The settings, each from the command line, else from LORAPLEX_<NAME>, else by default.

    `load_settings` makes them.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="forbid", frozen=True, allow_inf_nan=False
    )

    home: Path = Field(Path("~/.loraplex"), description="Folder of the server's data")
    model: Checkpoint = Field(description="Folder of a Hugging Face checkpoint")
    served_model_name: ModelName = Field("base", description="Name of the base model in the API")
    adapters: dict[ModelName, Folder] = Field(
        {}, description="PEFT adapter folders, by the name of the model in the API"
    )
    allow_base_mismatch: bool = Field(
        False, description="Accept adapters that were trained on a base model of another name"
    )
    strict_adapters: bool = Field(
        True,
        description="Whether a refused adapter ends the start; false: only that adapter fails",
    )
    base_prompts: dict[ModelName, File] = Field(
        {}, description="Prompts that all tenants share, by name: a text, or messages in .json"
    )
    adapter_activations: dict[ModelName, Activation] = Field(
        {}, description="Point from which an adapter acts, where it differs from its training"
    )
    adapter_base_prompts: dict[ModelName, ModelName] = Field(
        {}, description="Default base prompt of an adapter, for requests that name none"
    )
    allow_chat_templates: bool = Field(
        False,
        description="Allow requests to bring their own chat templates, which run within limits",
    )
    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one")
    api_key: Key | None = Field(
        None, description="API key that callers must present; generated if not set"
    )
    operator_key: SecretStr | None = Field(
        None,
        min_length=1,
        description="API key of the operator, which may also change adapters; not set: nobody may",
    )
    cors_origins: Origins = Field(
        (), description="Web origins whose pages may call the API, separated by commas, or *"
    )
    max_body_size: Bytes = Field(
        16 * 2**20, ge=1, description="Largest request body, such as 16MiB"
    )
    max_open_choices: int | None = Field(
        None, ge=1, description="Maximum number of choices that one tenant may have open at once"
    )
    max_connections: int = Field(
        ConnectionLimits.max_connections,
        ge=1,
        description="Maximum number of open connections, lowered to fit the limit on open files",
    )
    max_connections_per_address: int = Field(
        ConnectionLimits.max_per_address,
        ge=1,
        description="Maximum number of open connections from one network address",
    )
    request_timeout: float = Field(
        ConnectionLimits.request_timeout,
        gt=0,
        le=3600,
        description="Time limit in seconds for the head of a request, and per 16 KiB of its body",
    )
    send_timeout: float = Field(
        ConnectionLimits.send_timeout,
        gt=0,
        le=3600,
        description="Time limit in seconds for a client to read any part of its answer",
    )
    max_unread: Bytes = Field(
        2 * 2**20,
        ge=2**16,
        description="Maximum size of unread stream data kept for a slow client",
    )
    max_queue: int = Field(
        16384,
        ge=4,
        description="Maximum number of choices that run or wait; further requests get 429",
    )
    metrics_token: SecretStr | None = Field(
        None, min_length=1, description="Token required by /metrics; not set: no token is required"
    )
    metrics_max_age: float = Field(
        1.0,
        ge=0,
        le=3600,
        description="Time in seconds for which one rendering of /metrics is reused",
    )
    keep_alive_timeout: float = Field(
        ConnectionLimits.keep_alive_timeout,
        gt=0,
        le=3600,
        description="Time in seconds for which an idle connection stays open",
    )
    shutdown_timeout: float = Field(
        10.0,
        ge=0,
        le=3600,
        description="Time in seconds for running requests to finish after a stop signal",
    )

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        _ENGINE["dtype"],
        description="Number format of the weights and the KV cache; auto: as in the checkpoint",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        _ENGINE["device"], description="Device on which the model runs; auto: cuda if available"
    )
    max_model_len: int | None = Field(
        _ENGINE["max_model_len"],
        ge=2,
        description="Maximum length of prompt and answer in tokens; not set: the model's own",
    )
    max_num_seqs: int = Field(
        _ENGINE["max_num_seqs"], ge=1, description="Maximum number of sequences that run at once"
    )
    max_num_batched_tokens: int = Field(
        _ENGINE["max_num_batched_tokens"],
        ge=1,
        description="Maximum number of tokens computed in one step",
    )
    max_num_waiting: int = Field(
        _ENGINE["max_num_waiting"],
        ge=1,
        description="Maximum number of waiting prompts of one tenant; further requests get 503",
    )
    kv_cache_memory: Bytes | None = Field(
        _ENGINE["kv_cache_memory"],
        ge=1,
        description="Memory for the KV cache, such as 2GiB; not set: a share of the free memory",
    )
    block_size: int = Field(
        _ENGINE["block_size"], ge=1, description="Number of tokens in one KV block"
    )
    kv_group_size: int | None = Field(
        _ENGINE["kv_group_size"],
        ge=1,
        description="Number of layers in one KV block; not set: by the adapters in the store",
    )
    offload_memory: Bytes | None = Field(
        _ENGINE["offload_memory"],
        ge=0,
        description="Host memory for evicted KV blocks; not set: 1GiB with a GPU",
    )
    offload_disk: Bytes = Field(
        _ENGINE["offload_disk"],
        ge=0,
        description="Disk space for KV blocks that are evicted from host memory; 0: none",
    )
    eviction: Literal["cost", "lru"] = Field(
        _ENGINE["eviction"],
        description="Eviction policy for idle KV blocks and adapters: cost-based, or plain LRU",
    )
    eviction_half_life: float = Field(
        _ENGINE["eviction_half_life"],
        ge=0.001,
        description="Half-life in seconds of past uses in the cost-based eviction policy",
    )
    scheduling: Literal["fair", "fcfs"] = Field(
        _ENGINE["scheduling"],
        description="Scheduling policy: fair shares between tenants, or first come, first served",
    )
    max_adapter_slots: int = Field(
        _ENGINE["max_adapter_slots"],
        ge=1,
        description="Maximum number of adapters on the device at once",
    )
    adapter_memory: Bytes | None = Field(
        _ENGINE["adapter_memory"],
        ge=0,
        description="Device memory for adapters; not set: rank 16 on all linears in each slot",
    )
    seed: int | None = Field(
        _ENGINE["seed"],
        ge=-MAX_SEED - 1,
        le=MAX_SEED,
        description="Seed for requests without a seed of their own; not set: random",
    )
    hang_timeout: float = Field(
        _HANG_LIMITS["hang_timeout"],
        ge=2,
        le=86400,
        description="Time in seconds without a heartbeat after which the engine is replaced",
    )
    step_timeout: float = Field(
        _HANG_LIMITS["step_timeout"],
        ge=2,
        le=86400,
        description="Time limit in seconds for one step, after which the engine is replaced",
    )
    num_threads: int | None = Field(
        _ENGINE["num_threads"],
        ge=1,
        le=MAX_THREADS,
        description="Number of CPU threads; not set: chosen by torch",
    )
    kernels: Literal["auto", "naive", "triton"] = Field(
        _ENGINE["kernels"],
        description="Kernels; auto: the fastest available, naive: plain torch, triton: for a GPU",
    )
    quantization: Literal["none", "int8"] = Field(
        _ENGINE["quantization"],
        description="Weight quantization; int8: half the memory on a CPU, slightly less exact",
    )

    @field_validator("adapter_activations", "adapter_base_prompts")
    @classmethod
    def _names_what_there_is(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        named = {"adapter": ("adapters", set(value))}
        if info.field_name == "adapter_base_prompts":
            named["base prompt"] = ("base_prompts", set(value.values()))
        faults = [
            f"there is no {kind} {', '.join(unknown)}"
            for kind, (setting, names) in named.items()
            if (unknown := sorted(names.difference(info.data.get(setting, names))))
        ]
        if faults:
            raise ValueError("; ".join(faults))
        return value

    @property
    def key(self) -> str:
        return "" if self.api_key is None else self.api_key.get_secret_value()

    @property
    def operators_key(self) -> str | None:
        return None if self.operator_key is None else self.operator_key.get_secret_value()

    @property
    def pasted_key(self) -> str:
        """The key as a shell word; a key from the environment is referred to, not shown."""
        from_environment = os.environ.get(f"{PREFIX}API_KEY") == self.key
        return f'"${PREFIX}API_KEY"' if from_environment else shlex.quote(self.key)

    @property
    def home_folder(self) -> Path:
        return self.home.expanduser().absolute()

    @property
    def adapter_store(self) -> Path:
        return self.home_folder / "adapters"

    def hang_limits(self) -> HangLimits:
        return HangLimits(hang_timeout=self.hang_timeout, step_timeout=self.step_timeout)

    def engine_config(self) -> EngineConfig:
        """Returns the engine's settings.

        Raises:
            SettingsRefused: if settings conflict.
        """
        shared = {
            name: getattr(self, name)
            for name in EngineConfig.__struct_fields__
            if name in type(self).model_fields
        }
        shared |= {"model": str(self.model), "adapter_store": str(self.adapter_store)}
        try:
            return EngineConfig(**shared)
        except ValueError as error:
            raise SettingsRefused(str(error).split("; ")) from error


def load_settings(given: dict[str, Any]) -> Settings:
    """Returns settings from `given`, the environment and the defaults, in this order.

    Raises:
        SettingsRefused: naming every setting at fault.
    """
    unknown = [
        f"{name} is not a setting of Loraplex"
        for name in sorted(os.environ)
        if name.startswith(PREFIX)
        and name.removeprefix(PREFIX).lower() not in Settings.model_fields
    ]
    if unknown:
        raise SettingsRefused(unknown)
    try:
        settings = Settings(**given)
    except ValidationError as error:
        raise SettingsRefused([_describe(fault) for fault in error.errors()]) from error
    return settings.model_copy(
        update={"api_key": settings.api_key or SecretStr(f"lpx_{secrets.token_urlsafe(32)}")}
    )


def option_of(setting: str) -> str:
    """Returns a setting's option on the command line, which is singular if it is repeatable."""
    return setting.removesuffix("s" if setting in MAPPINGS else "").replace("_", "-")


def _describe(fault: ErrorDetails) -> str:
    name = str(fault["loc"][0]) if fault["loc"] else "settings"
    inner = "".join(f" {part}" for part in fault["loc"][1:] if part != "[key]")
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "missing":
        message = "must be given"
    return f"--{option_of(name)} ({PREFIX}{name.upper()}){inner}: {message[0].lower()}{message[1:]}"
