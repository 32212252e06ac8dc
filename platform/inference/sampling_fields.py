"""What both inference routes take to choose tokens, under OpenAI's and vLLM's names."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo
from pydantic import field_validator as validates

from loraplex.engine.sampling_params import RANGES, InvalidSamplingParams, SamplingParams
from loraplex.platform.errors import Fault, InvalidRequest


def only(*harmless: object) -> AfterValidator:
    """For a parameter that is not supported: it may be left out, or say what is done anyway."""

    def check(value: object) -> object:
        if value is None or value in harmless:
            return value
        raise ValueError("this server does not support it; leave it out")

    return AfterValidator(check)


def check_text(text: str) -> str:
    """JSON can spell half a surrogate pair, but no text holds one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must not hold a lone surrogate, which is no character") from None
    return text


def _as_texts(value: object) -> object:
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        return tuple(map(check_text, texts))
    raise ValueError("must be a string or a list of strings")


def _as_bias(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(key.isdecimal() for key in value):
        raise ValueError("must map token ids to numbers")
    return {int(key): bias for key, bias in value.items()}


def _as_token_ids(value: object) -> object:
    if value is None:
        return ()
    if isinstance(value, list) and all(type(token) is int for token in value):
        return tuple(value)
    raise ValueError("must be a list of token ids")


Ignored = Any  # says nothing about the tokens
Text = Annotated[str, AfterValidator(check_text)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_as_texts)]
TokenIds = Annotated[tuple[int, ...], BeforeValidator(_as_token_ids)]
Bias = Annotated[dict[int, float] | None, BeforeValidator(_as_bias)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: Ignored = None


class SamplingFields(BaseModel):
    """A null is the same as leaving the parameter out."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: Text
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    logit_bias: Bias = None
    stop: Texts = ()

    # vLLM's own
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = Field(None, gt=0)
    min_tokens: int | None = None
    stop_token_ids: TokenIds = ()
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = Field(None, ge=-1000, le=1000, description="Lower runs first")

    # Loraplex's own
    base_prompt: Text | None = Field(None, description="Name of a published prompt to begin with")

    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None

    @validates(*(name for name, _, _ in RANGES if name != "logprobs"), check_fields=False)
    @classmethod
    def _is_in_range(cls, value: float | None, info: ValidationInfo) -> float | None:
        low, high = next((low, high) for name, low, high in RANGES if name == info.field_name)
        if value is None or low <= value <= high:
            return value
        raise ValueError(f"must be between {low} and {high}, got {value}")

    @validates("stream_options")
    @classmethod
    def _needs_stream(
        cls, value: StreamOptions | None, info: ValidationInfo
    ) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("is only allowed when stream is true")
        return value

    @validates("prompt_logprobs")
    @classmethod
    def _needs_no_stream(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("stream"):
            raise ValueError("is not available when stream is true")
        return value

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def to_sampling(self, **more: object) -> SamplingParams:
        """Raises InvalidRequest with every fault that only shows when all is put together."""
        names = SamplingParams.__struct_fields__
        given = {name: getattr(self, name) for name in names if name in type(self).model_fields}
        given |= more
        given = {name: value for name, value in given.items() if value is not None}
        try:
            return SamplingParams(**given)
        except InvalidSamplingParams as error:
            raise InvalidRequest.of([Fault(*fault) for fault in error.faults]) from error
