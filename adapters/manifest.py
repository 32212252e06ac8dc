"""AdapterRef and AdapterManifest: which adapter it is, and what its config asks for. Torch-free."""

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self

import msgspec

from loraplex.adapters.checks.peft_config import ConfigReader, unsupported
from loraplex.adapters.errors import AdapterRejected

MAX_RANK = 256
MAX_CONFIG_BYTES = 1 << 20
ALL_LINEAR = "all-linear"

_MAX_ALPHA = 1e6
_MAX_LAYER = 10_000
_MAX_TOKEN_ID = 1 << 31
_MAX_INVOCATION_TOKENS = 512
_MAX_NAMES = 4096
_MAX_NAME_LENGTH = 512
_MAX_REGEX_LENGTH = 4096


class Activation(StrEnum):
    """The token from which on an adapter acts."""

    ALWAYS = "always"  # from the first
    INVOCATION = "invocation"  # from the last occurrence of its invocation tokens
    AFTER_PROMPT = "after_prompt"  # from the end of the base prompt


class AdapterRef(msgspec.Struct, frozen=True, kw_only=True):
    """Names one immutable version of one tenant's adapter. Equality and hash use all three
    fields."""

    tenant: str
    adapter_id: str
    digest: str  # SHA-256 over the config that matters and the weights


class AdapterLoad(msgspec.Struct, frozen=True):
    """What a device slot holds from the next step on."""

    slot: int
    digest: str | None  # of the adapter's content; None: nothing


class AdapterStats(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's adapters. Gauges are values now, counters run from the start."""

    registered: int = 0
    resident: int = 0  # in a slot
    slots: int = 0
    loads: int = 0  # into host memory
    evictions: int = 0  # from slots
    references: int = 0  # of sequences on slots
    host_bytes: int = 0


class Folder(msgspec.Struct, frozen=True, tag="folder"):
    """A PEFT folder."""

    path: str


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """The engine's own copy of an adapter, under the digest that it was registered with."""

    digest: str
    origin: str | None = None  # the folder that it came from; mends a damaged copy


class AdapterManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a PEFT `adapter_config.json` says, as far as it decides the output.

    The rules for names and patterns are PEFT's; `adapters.checks.catalogue` applies them to a base
    model.
    """

    rank: int
    alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}  # the first key that matches a module wins
    alpha_pattern: dict[str, float] = {}
    target_modules: tuple[str, ...] | str = ()  # names, a regular expression, or "all-linear"
    exclude_modules: tuple[str, ...] | str = ()
    saved_modules: tuple[str, ...] = ()  # the file has full copies of these, equal to the base's
    layers_to_transform: tuple[int, ...] = ()  # empty: every layer
    layers_pattern: tuple[str, ...] = ()
    invocation_tokens: list[int] | None = None  # activated LoRA: acts from their last occurrence
    base_model: str = ""  # what it was trained on; not part of the identity

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """Parses and checks an `adapter_config.json`.

        Raises:
            AdapterRejected: with every fault: bad JSON, bad values, unsupported features.
        """
        if len(raw) > MAX_CONFIG_BYTES:
            limit = f"{MAX_CONFIG_BYTES} bytes"
            raise AdapterRejected([f"adapter_config.json is larger than {limit}"])
        try:
            config = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise AdapterRejected([f"adapter_config.json is not valid JSON: {error}"]) from error
        if not isinstance(config, dict):
            raise AdapterRejected(["adapter_config.json must hold an object"])
        return cls._from_config(config)

    @classmethod
    def _from_config(cls, config: Mapping[str, Any]) -> Self:
        reader = ConfigReader(config)
        manifest = cls(
            rank=reader.integer("r", 8, 1, MAX_RANK),
            alpha=reader.number("lora_alpha", 8, -_MAX_ALPHA, _MAX_ALPHA),
            use_rslora=reader.flag("use_rslora"),
            rank_pattern=reader.integer_map("rank_pattern", 1, MAX_RANK),
            alpha_pattern=reader.numbers("alpha_pattern", -_MAX_ALPHA, _MAX_ALPHA),
            target_modules=_names_or_regex(reader, "target_modules"),
            exclude_modules=_names_or_regex(reader, "exclude_modules"),
            saved_modules=reader.names("modules_to_save", _MAX_NAMES, _MAX_NAME_LENGTH),
            layers_to_transform=tuple(
                reader.integers("layers_to_transform", _MAX_LAYER, _MAX_NAMES) or ()
            ),
            layers_pattern=_layers_pattern(reader),
            invocation_tokens=reader.integers(
                "alora_invocation_tokens", _MAX_TOKEN_ID, _MAX_INVOCATION_TOKENS
            ),
            base_model=reader.text("base_model_name_or_path", _MAX_REGEX_LENGTH),
        )
        faults = [*reader.faults, *unsupported(config), *manifest._contradictions(config)]
        if faults:
            raise AdapterRejected(faults)
        return manifest

    def _contradictions(self, config: Mapping[str, Any]) -> list[str]:
        faults = []
        if config.get("target_modules") in (None, [], ""):
            faults.append("target_modules is missing")
        by_regex = isinstance(self.target_modules, str)
        if by_regex and (self.layers_to_transform or self.layers_pattern):
            faults.append(
                "layers_to_transform and layers_pattern need target_modules to be a list of names"
            )
        if self.layers_pattern and not self.layers_to_transform:
            faults.append("layers_pattern needs layers_to_transform")
        if self.invocation_tokens == []:
            faults.append("alora_invocation_tokens must not be empty")
        return faults

    @property
    def activation(self) -> Activation:
        """Returns the activation that it was trained for."""
        return Activation.INVOCATION if self.invocation_tokens else Activation.ALWAYS

    @property
    def fingerprint(self) -> str:
        """Returns SHA-256 over every field that decides the output, whatever order a set was saved
        in."""
        identity = msgspec.structs.replace(
            self,
            base_model="",
            target_modules=_sorted(self.target_modules),
            exclude_modules=_sorted(self.exclude_modules),
            saved_modules=(),
        )
        names = [name for name in identity.__struct_fields__ if name != "saved_modules"]
        fields = [getattr(identity, name) for name in names]
        if self.saved_modules:
            fields.append(_sorted(self.saved_modules))
        # Pairs, because the order of patterns matters and an encoder may sort a mapping.
        framed = [list(f.items()) if isinstance(f, dict) else f for f in fields]
        return hashlib.sha256(msgspec.json.encode(framed)).hexdigest()


def _names_or_regex(reader: ConfigReader, key: str) -> tuple[str, ...] | str:
    if not reader.is_text(key):
        return reader.names(key, _MAX_NAMES, _MAX_NAME_LENGTH)
    text = reader.text(key, _MAX_REGEX_LENGTH)
    return ALL_LINEAR if key == "target_modules" and text.lower() == ALL_LINEAR else text


def _layers_pattern(reader: ConfigReader) -> tuple[str, ...]:
    if not reader.is_text("layers_pattern"):
        return reader.names("layers_pattern", _MAX_NAMES, _MAX_NAME_LENGTH)
    pattern = reader.text("layers_pattern", _MAX_NAME_LENGTH)
    return (pattern,) if pattern else ()


def _sorted(names: tuple[str, ...] | str) -> tuple[str, ...] | str:
    return names if isinstance(names, str) else tuple(sorted(set(names)))
