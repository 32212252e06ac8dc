"""InferenceService: turns a checked body into a Generation, or into an error."""

import uuid
from dataclasses import replace

from loraplex.engine.client import STARTING, EngineClient
from loraplex.engine.model_limits import ModelLimits
from loraplex.engine.request_seeds import RequestSeeds
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.auth.principal import Principal
from loraplex.platform.catalog.base_prompts import BasePrompts
from loraplex.platform.catalog.service import Catalog, Model
from loraplex.platform.errors import InvalidRequest, Unavailable
from loraplex.platform.inference.assembly import CallTerms, assemble
from loraplex.platform.inference.bodies.sampling_fields import SamplingFields
from loraplex.platform.inference.bodies.schemas import (
    DEFAULT_COMPLETION_TOKENS,
    ChatCompletionRequest,
    CompletionRequest,
)
from loraplex.platform.inference.generation import Generation
from loraplex.platform.inference.limits import check_choices, check_sampling
from loraplex.platform.inference.prompts.encoding import encode_chat, encode_prompts, kept_tokens
from loraplex.platform.inference.prompts.prompt_prefix import PromptPrefix
from loraplex.platform.inference.prompts.served_tokenizer import ServedTokenizer
from loraplex.platform.inference.prompts.tokenizer_threads import TokenizerThreads
from loraplex.platform.inference.prompts.words import bad_sequences, refuse_foreign_template

FINGERPRINT_LENGTH = 12


class InferenceService:
    """Resolves the model, tokenises the prompts, and checks what depends on both."""

    def __init__(
        self,
        engine: EngineClient,
        catalog: Catalog,
        base_prompts: BasePrompts,
        seeds: RequestSeeds,
        tokenizer: ServedTokenizer,
        *,
        allow_chat_templates: bool = False,
    ) -> None:
        """`allow_chat_templates`: whether callers may bring templates of their own."""
        self.engine = engine
        self._catalog = catalog
        self._base_prompts = base_prompts
        self._seeds = seeds
        self._allow_chat_templates = allow_chat_templates
        self._tokenizer = tokenizer
        self._threads = TokenizerThreads()

    def close(self) -> None:
        self._threads.close()

    async def chat(self, principal: Principal, body: ChatCompletionRequest) -> Generation:
        """Returns the generation of a chat.

        Raises:
            ApiError: if the chat cannot be served as asked.
            PromptRejected: if the chat template refuses the messages.
        """
        terms, tokenizer = await self._open("chatcmpl", "messages", principal, body, None)
        template = body.chat_template or terms.model.text.chat_template
        sampling = body.to_sampling(
            max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=body.num_logprobs,
            stop=(*body.stop, *(() if template else tokenizer.default_stop)),
            bad_token_sequences=await bad_sequences(tokenizer, body.bad_words),
        )
        check_sampling(terms.limits, sampling)
        if not self._allow_chat_templates:
            refuse_foreign_template(tokenizer, body.chat_template)
        job = terms.tokenizer_job(body.num_characters)
        keep = kept_tokens(terms.limits, terms.prefix, body, sampling)
        prompt = await self._threads.run(
            job, tokenizer, encode_chat, body, terms.prefix, template, keep
        )
        return await assemble(terms, [prompt], sampling, self._seeds, tokenizer)

    async def completion(self, principal: Principal, body: CompletionRequest) -> Generation:
        """Returns the generation of a completion.

        Raises:
            ApiError: if the completion cannot be served as asked.
        """
        terms, tokenizer = await self._open(
            "cmpl", "prompt", principal, body, DEFAULT_COMPLETION_TOKENS
        )
        prompt_logprobs = body.prompt_logprobs
        if prompt_logprobs is None and body.echo:
            prompt_logprobs = body.logprobs
        sampling = body.to_sampling(
            max_tokens=1 if body.only_scores else body.max_tokens,
            prompt_logprobs=prompt_logprobs,
            bad_token_sequences=await bad_sequences(tokenizer, body.bad_words),
        )
        check_sampling(terms.limits, sampling)
        check_choices(len(body.prompt), sampling.n)
        job = terms.tokenizer_job(body.num_characters)
        keep = kept_tokens(terms.limits, terms.prefix, body, sampling)
        prompts = await self._threads.run(job, tokenizer, encode_prompts, body, terms.prefix, keep)
        generation = await assemble(terms, prompts, sampling, self._seeds, tokenizer)
        return replace(generation, only_scores=body.only_scores)

    async def _open(
        self,
        kind: str,
        param: str,
        principal: Principal,
        body: SamplingFields,
        default_tokens: int | None,
    ) -> tuple[CallTerms, Tokenizer]:
        model = await self._catalog.resolve(principal, body.model)
        info = self.engine.info
        self.engine.refuse_unless_ready()
        if info is None:
            raise Unavailable(STARTING)
        terms = CallTerms(
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
        return terms, self._tokenizer.get()

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
