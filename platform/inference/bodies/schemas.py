"""The bodies of the two inference routes."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo
from pydantic import field_validator as validates
from typing_extensions import TypedDict

from loraplex.engine.sampling_params import MAX_COUNT
from loraplex.platform.errors import InvalidRequest
from loraplex.platform.inference.answers.answer_options import AnswerOptions
from loraplex.platform.inference.bodies.fields import Body, Ignored, Text, Within, check_text, only
from loraplex.platform.inference.bodies.sampling_fields import LIMITS, SamplingFields

MAX_PROMPTS = 1024
MAX_MESSAGES = 2048
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions only


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


def _as_content(value: object) -> object:
    """Returns a string, or OpenAI's list of parts; templates take one or the other."""
    if isinstance(value, str):
        return check_text(value)
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    return [_text_part(part) for part in value]


def _text_part(part: object) -> TextPart:
    match part:
        case {"type": "text", "text": str(text), **rest} if not rest:
            return {"type": "text", "text": check_text(text)}
    raise ValueError('takes only parts of the form {"type": "text", "text": "..."}')


def _as_prompts(value: object) -> object:
    """Returns any of the four forms of `prompt` as a list of texts or of token id lists."""
    match value:
        case str():
            return [check_text(value)]
        case [int(), *_]:
            return [_token_ids(value)]
        case [] | None:
            raise ValueError("must not be empty")
        case list() if len(value) > MAX_PROMPTS:
            raise ValueError(f"takes at most {MAX_PROMPTS} prompts, got {len(value)}")
        case [str(), *_] if all(isinstance(text, str) for text in value):
            return [check_text(str(text)) for text in value]
        case [list(), *_]:
            return [_token_ids(ids) for ids in value]
    raise ValueError("must be a text, a list of texts, a list of token ids, or a list of those")


def _not_false(value: object) -> object:
    """Returns None for false, which some clients send."""
    return None if value is False else value


def _token_ids(value: object) -> list[int]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError("must hold integers as token ids")
    return value


Prompts = Annotated[
    list[str] | list[list[int]],
    PlainValidator(
        _as_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
    ),
]
Content = Annotated[
    str | list[TextPart],
    PlainValidator(_as_content, json_schema_input_type=str | list[TextPart]),
]


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Text | None = None

    # Fields of an answer that is sent back unchanged.
    refusal: Annotated[Any, only()] = None
    annotations: Annotated[Any, only([])] = None
    audio: Annotated[Any, only()] = None
    function_call: Annotated[Any, only()] = None
    tool_calls: Annotated[Any, only([])] = None

    def for_template(self) -> dict[str, Any]:
        role = "system" if self.role == "developer" else self.role
        name = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": self.content, **name}


class ChatCompletionRequest(SamplingFields):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int | None, LIMITS["max_tokens"]] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, LIMITS["logprobs"]] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    parallel_tool_calls: Ignored = None
    tools: Annotated[Any, only([])] = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    response_format: Annotated[Any, only({"type": "text"})] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Annotated[Any, only()] = None
    prediction: Annotated[Any, only()] = None
    reasoning_effort: Annotated[Any, only("none")] = None
    verbosity: Annotated[Any, only("medium")] = None
    web_search_options: Annotated[Any, only()] = None
    documents: Annotated[Any, only([])] = None
    echo: Annotated[Any, only(False)] = None
    include_reasoning: Annotated[Any, only(True, False)] = None

    @validates("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("needs logprobs to be true")
        return value

    @validates("continue_final_message")
    @classmethod
    def _is_no_new_turn(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("add_generation_prompt"):
            raise ValueError("cannot be true when add_generation_prompt is")
        return value

    @property
    def num_characters(self) -> int:
        """Number of characters in all messages."""
        texts = (message.content for message in self.messages)
        return sum(
            len(text) if isinstance(text, str) else sum(len(part["text"]) for part in text)
            for text in texts
        )

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(SamplingFields):
    max_tokens: Annotated[int | None, Within(0, MAX_COUNT)] = None
    prompt: Prompts
    logprobs: Annotated[int | None, LIMITS["logprobs"], BeforeValidator(_not_false)] = None
    echo: bool | None = False
    best_of: int | None = None
    suffix: Annotated[Any, only("")] = None
    response_format: Annotated[Any, only({"type": "text"})] = None

    @property
    def only_scores(self) -> bool:
        """Whether the call wants no answer, only the prompt with its log-probabilities.

        Raises:
            InvalidRequest: if the call wants neither, or no answer of a minimum length.
        """
        if self.max_tokens != 0:
            return False
        if self.echo is not True:
            raise InvalidRequest(
                "max_tokens must be at least 1, or 0 with echo, which scores the prompt.",
                "max_tokens",
            )
        if self.min_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens (0)", "min_tokens"
            )
        return True

    @property
    def answer_options(self) -> AnswerOptions:
        return replace(super().answer_options, echo=self.echo is True)

    @validates("best_of")
    @classmethod
    def _is_n(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value != (info.data.get("n") or 1):
            raise ValueError("is only supported where it equals n")
        return value

    @property
    def num_characters(self) -> int:
        """Number of characters in all prompts that are texts."""
        return sum(len(prompt) for prompt in self.prompt if isinstance(prompt, str))
