"""The parameters of both inference routes, under OpenAI's and vLLM's names."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo
from pydantic import field_validator as validates

from loraplex.engine.sampling_params import (
    MAX_BAD_WORDS,
    MAX_COUNT,
    MAX_REPETITION_PENALTY,
    MAX_STOP_STRINGS,
    RANGES,
    InvalidSamplingParams,
    SamplingParams,
)
from loraplex.platform.errors import Fault, InvalidRequest
from loraplex.platform.inference.answers.answer_options import AnswerOptions
from loraplex.platform.inference.bodies.fields import Body, Ignored, Text, Within, check_text, only

LIMITS = {name: Within(low, high) for name, low, high in RANGES}
MAX_PRIORITY = 1000
MAX_WORD_LENGTH = 256
MAX_DIGITS = 20  # of a token id in words


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
    if not isinstance(value, dict):
        raise ValueError("must map token ids to numbers")
    wrong = next((key for key in value if not _is_token_id(key)), None)
    if wrong is not None:
        raise ValueError(f"must map token ids to numbers, got the key {str(wrong)[:40]!r}")
    return {int(key): bias for key, bias in value.items()}


def _is_token_id(key: object) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= MAX_DIGITS


def _as_token_ids(value: object) -> object:
    if value is None:
        return ()
    if isinstance(value, list) and all(type(token) is int for token in value):
        return tuple(value)
    raise ValueError("must be a list of token ids")


def _as_stop(value: object) -> object:
    texts = _as_texts(value)
    if isinstance(texts, tuple) and len(texts) > MAX_STOP_STRINGS:
        raise ValueError(f"takes at most {MAX_STOP_STRINGS} strings, got {len(texts)}")
    return texts


def _as_allowed(value: object) -> object:
    return None if value is None else _as_token_ids(value)


def _as_bad_words(value: object) -> object:
    words = _as_texts(value)
    if isinstance(words, tuple) and (
        len(words) > MAX_BAD_WORDS or not all(0 < len(word) <= MAX_WORD_LENGTH for word in words)
    ):
        raise ValueError(
            f"takes at most {MAX_BAD_WORDS} words of 1 to {MAX_WORD_LENGTH} characters"
        )
    return words


Texts = Annotated[
    tuple[str, ...], BeforeValidator(_as_stop, json_schema_input_type=str | list[str])
]
TokenIds = Annotated[
    tuple[int, ...], BeforeValidator(_as_token_ids, json_schema_input_type=list[int])
]
AllowedTokenIds = Annotated[
    tuple[int, ...] | None, BeforeValidator(_as_allowed, json_schema_input_type=list[int])
]
BadWords = Annotated[
    tuple[str, ...], BeforeValidator(_as_bad_words, json_schema_input_type=list[str])
]
Bias = Annotated[dict[int, float] | None, BeforeValidator(_as_bias)]


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Ignored = None


class SamplingFields(Body):
    model: Text
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int | None, LIMITS["n"]] = None
    max_tokens: Annotated[int | None, LIMITS["max_tokens"]] = None
    temperature: Annotated[float | None, LIMITS["temperature"]] = None
    top_p: Annotated[float | None, Within(0.0, 1.0, above=True)] = None
    frequency_penalty: Annotated[float | None, LIMITS["frequency_penalty"]] = None
    presence_penalty: Annotated[float | None, LIMITS["presence_penalty"]] = None
    seed: Annotated[int | None, LIMITS["seed"]] = None
    logit_bias: Bias = None
    stop: Texts = ()

    # vLLM's own
    top_k: Annotated[int | None, LIMITS["top_k"]] = None
    min_p: Annotated[float | None, LIMITS["min_p"]] = None
    repetition_penalty: Annotated[float | None, Within(0.0, MAX_REPETITION_PENALTY, above=True)] = (
        None
    )
    min_tokens: Annotated[int | None, LIMITS["min_tokens"]] = None
    stop_token_ids: TokenIds = ()
    allowed_token_ids: AllowedTokenIds = None
    bad_words: BadWords = ()
    truncate_prompt_tokens: Annotated[int | None, Within(-1, MAX_COUNT)] = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int | None, LIMITS["prompt_logprobs"]] = None
    add_special_tokens: bool | None = None
    priority: Annotated[int | None, Within(-MAX_PRIORITY, MAX_PRIORITY)] = Field(
        None, description="Lower runs first"
    )

    # Loraplex's own
    base_prompt: Text | None = Field(None, description="Name of a published prompt to begin with")

    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None

    # Parameters that are accepted only with values without effect.
    use_beam_search: Annotated[Any, only(False)] = None
    length_penalty: Annotated[Any, only(1, 1.0)] = None
    early_stopping: Annotated[Any, only(False)] = None
    logits_processors: Annotated[Any, only([])] = None
    spaces_between_special_tokens: Annotated[Any, only(True)] = None

    @validates("truncate_prompt_tokens")
    @classmethod
    def _keeps_something(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("must be -1, for as many as fit, or at least 1")
        return value

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
    def answer_options(self) -> AnswerOptions:
        streamed = self.stream_options or StreamOptions()
        return AnswerOptions(
            usage_at_end=streamed.include_usage,
            usage_in_chunks=streamed.continuous_usage_stats,
            token_ids=self.return_token_ids is True,
            tokens_as_ids=self.return_tokens_as_token_ids is True,
        )

    def to_sampling(self, **more: object) -> SamplingParams:
        """Returns the sampling parameters.

        Raises:
            InvalidRequest: with every fault of their combination.
        """
        names = SamplingParams.__struct_fields__
        given = {name: getattr(self, name) for name in names if name in type(self).model_fields}
        given |= more
        given = {name: value for name, value in given.items() if value is not None}
        try:
            return SamplingParams(**given)
        except InvalidSamplingParams as error:
            raise InvalidRequest.of([Fault(*fault) for fault in error.faults]) from error
