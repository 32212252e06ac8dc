"""CallTerms: what is known of a call before its prompts are tokenised."""

import uuid
from dataclasses import dataclass

from loraplex.engine.client import STARTING, EngineClient
from loraplex.engine.model_limits import ModelLimits
from loraplex.platform.auth.principal import Principal
from loraplex.platform.catalog.base_prompts import BasePrompts
from loraplex.platform.catalog.service import Catalog, Model
from loraplex.platform.errors import InvalidRequest, Unavailable
from loraplex.platform.inference.bodies.sampling_fields import SamplingFields
from loraplex.platform.inference.bodies.schemas import (
    DEFAULT_COMPLETION_TOKENS,
    ChatCompletionRequest,
    CompletionRequest,
)
from loraplex.platform.inference.prompts.prompt_prefix import PromptPrefix
from loraplex.platform.inference.prompts.tokenizer_threads import TokenizerJob

FINGERPRINT_LENGTH = 12


@dataclass(frozen=True)
class CallTerms:
    """Who calls which model, with which base prompt and within which limits."""

    id: str
    param: str  # the field that holds the prompts, for errors
    principal: Principal
    model: Model
    prefix: PromptPrefix | None
    limits: ModelLimits
    priority: int
    fingerprint: str  # of the model that answers
    default_tokens: int | None  # `max_tokens` of a call that names none; None: as many as fit

    def tokenizer_job(self, num_characters: int) -> TokenizerJob:
        max_tokens = self.limits.max_model_len
        return TokenizerJob(self.principal.tenant, self.param, num_characters, max_tokens)


class CallResolver:
    """Resolves what a call names: its model and its base prompt."""

    def __init__(self, engine: EngineClient, catalog: Catalog, base_prompts: BasePrompts) -> None:
        self._engine = engine
        self._catalog = catalog
        self._base_prompts = base_prompts

    async def chat(self, principal: Principal, body: ChatCompletionRequest) -> CallTerms:
        """Raises ApiError, or EngineUnavailable."""
        return await self._resolve("chatcmpl", "messages", principal, body, None)

    async def completion(self, principal: Principal, body: CompletionRequest) -> CallTerms:
        """Raises ApiError, or EngineUnavailable."""
        return await self._resolve("cmpl", "prompt", principal, body, DEFAULT_COMPLETION_TOKENS)

    async def _resolve(
        self,
        kind: str,
        param: str,
        principal: Principal,
        body: SamplingFields,
        default_tokens: int | None,
    ) -> CallTerms:
        model = await self._catalog.resolve(principal, body.model)
        self._engine.refuse_unless_ready()
        info = self._engine.info
        if info is None:
            raise Unavailable(STARTING)
        return CallTerms(
            id=f"{kind}-{uuid.uuid4().hex}",
            param=param,
            principal=principal,
            model=model,
            prefix=self._prefix(body, model),
            limits=ModelLimits.of(info),
            priority=body.priority or 0,
            fingerprint=f"fp_{info.model_revision[:FINGERPRINT_LENGTH]}",
            default_tokens=default_tokens,
        )

    def _prefix(self, body: SamplingFields, model: Model) -> PromptPrefix | None:
        """Returns the prefix that the request names, or else its model's."""
        is_named = body.base_prompt is not None
        name = body.base_prompt if is_named else model.base_prompt
        if name is None:
            return None
        prefix = PromptPrefix(self._base_prompts.resolve(name), is_named)
        _refuse_other_kind(prefix, body)
        return prefix


def _refuse_other_kind(prefix: PromptPrefix, body: SamplingFields) -> None:
    has_messages = bool(prefix.prompt.source.messages)
    if has_messages != isinstance(body, ChatCompletionRequest):
        kind = "messages, which begin chats" if has_messages else "a text, which begins completions"
        whose = "" if prefix.is_named else f" of the model '{body.model}'"
        raise InvalidRequest(
            f"The base prompt '{prefix.prompt.name}'{whose} is {kind} only.",
            "base_prompt" if prefix.is_named else "model",
        )
