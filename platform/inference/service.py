"""InferenceService: turns a checked body into a Generation, or into an error."""

from dataclasses import replace

from loraplex.engine.client import EngineClient
from loraplex.engine.request_seeds import RequestSeeds
from loraplex.platform.auth.principal import Principal
from loraplex.platform.catalog.base_prompts import BasePrompts
from loraplex.platform.catalog.service import Catalog
from loraplex.platform.inference.assembly import assemble
from loraplex.platform.inference.bodies.schemas import ChatCompletionRequest, CompletionRequest
from loraplex.platform.inference.call_terms import CallResolver
from loraplex.platform.inference.generation import Generation
from loraplex.platform.inference.limits import check_choices, check_sampling
from loraplex.platform.inference.prompts.encoding import encode_chat, encode_prompts, kept_tokens
from loraplex.platform.inference.prompts.served_tokenizer import ServedTokenizer
from loraplex.platform.inference.prompts.tokenizer_threads import TokenizerThreads
from loraplex.platform.inference.prompts.words import bad_sequences, refuse_foreign_template


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
        self._calls = CallResolver(engine, catalog, base_prompts)
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
        terms = await self._calls.chat(principal, body)
        tokenizer = self._tokenizer.get()
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
        terms = await self._calls.completion(principal, body)
        tokenizer = self._tokenizer.get()
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
