"""InferenceService: a checked body becomes a Generation, or an error that says why not."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from loraplex.engine.client import STARTING, EngineClient
from loraplex.engine.model_limits import ModelLimits
from loraplex.engine.protocol import GenerateRequest
from loraplex.engine.request_seeds import RequestSeeds
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.auth.principal import Principal
from loraplex.platform.catalog.adapter_text import AdapterText, read_adapter_text
from loraplex.platform.catalog.base_prompts import BasePrompts
from loraplex.platform.catalog.service import Catalog, Model
from loraplex.platform.errors import InvalidRequest, Unavailable
from loraplex.platform.inference.bodies.sampling_fields import SamplingFields
from loraplex.platform.inference.bodies.schemas import (
    DEFAULT_COMPLETION_TOKENS,
    ChatCompletionRequest,
    CompletionRequest,
)
from loraplex.platform.inference.generation import Generation, Prompt
from loraplex.platform.inference.limits import check_choices, check_sampling, fit
from loraplex.platform.inference.prompts.prompt_prefix import PromptPrefix
from loraplex.platform.inference.prompts.tokenizer_threads import TokenizerJob, TokenizerThreads
from loraplex.platform.inference.prompts.words import (
    bad_sequences,
    refuse_foreign_template,
    refuse_hidden_stops,
)

FINGERPRINT_LENGTH = 12


@dataclass(frozen=True)
class _Call:
    """What is known of a call before its prompt is tokenised."""

    id: str
    param: str  # which field holds the prompt
    principal: Principal
    model: Model
    prefix: PromptPrefix | None
    limits: ModelLimits
    priority: int
    fingerprint: str  # of the model that answers

    def tokenizer_job(self, num_characters: int) -> TokenizerJob:
        max_tokens = self.limits.max_model_len
        return TokenizerJob(self.principal.tenant, self.param, num_characters, max_tokens)


class InferenceService:
    """Resolves the model, tokenises, and checks what depends on both."""

    def __init__(
        self,
        engine: EngineClient,
        catalog: Catalog,
        base_prompts: BasePrompts,
        seeds: RequestSeeds,
        *,
        allow_chat_templates: bool = False,
    ) -> None:
        """`allow_chat_templates`: callers may bring templates of their own."""
        self.engine = engine
        self._catalog = catalog
        self._base_prompts = base_prompts
        self._seeds = seeds
        self._allow_chat_templates = allow_chat_templates
        self._tokenizer: Tokenizer | None = None
        self._folder: Path | None = None  # that it is from
        self._threads = TokenizerThreads()

    async def load_tokenizer(self, folder: Path) -> None:
        """To be awaited before requests are let through. The same folder again costs nothing.

        Raises:
            UnsupportedModel: if there is none to load.
        """
        if folder == self._folder:
            return
        found = await asyncio.to_thread(Tokenizer.from_folder, folder)
        if self._tokenizer is not None:
            self._tokenizer.close()
        self._tokenizer = found
        self._folder = folder

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises Unavailable before there is one."""
        if self._tokenizer is None:
            raise Unavailable(STARTING)
        return self._tokenizer

    def close(self) -> None:
        self._threads.close()
        if self._tokenizer is not None:
            self._tokenizer.close()

    async def read_adapter_text(self, folder: Path) -> AdapterText:
        """What an adapter's folder says about text.

        Raises:
            RequestRejected: where it has a chat template that is none.
        """
        if self._tokenizer is None or self._folder is None:
            raise Unavailable(STARTING)
        return await asyncio.to_thread(read_adapter_text, folder, self._folder, self._tokenizer)

    async def chat(self, principal: Principal, body: ChatCompletionRequest) -> Generation:
        """Raises ApiError, or PromptRejected by the chat template."""
        call, tokenizer = await self._open("chatcmpl", "messages", principal, body)
        template = body.chat_template or call.model.text.chat_template
        sampling = body.to_sampling(
            max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=body.num_logprobs,
            stop=(*body.stop, *(() if template else tokenizer.default_stop)),
            bad_token_sequences=await _bad_sequences(tokenizer, body),
        )
        check_sampling(call.limits, sampling)
        if not self._allow_chat_templates:
            refuse_foreign_template(tokenizer, body.chat_template)
        job = call.tokenizer_job(body.num_characters)
        keep = _kept_tokens(call, body, sampling)
        prompt = await self._threads.run(job, tokenizer, _render, body, call.prefix, template, keep)
        return self._assemble(call, [prompt], sampling, default_tokens=None)

    async def completion(self, principal: Principal, body: CompletionRequest) -> Generation:
        """Raises ApiError."""
        call, tokenizer = await self._open("cmpl", "prompt", principal, body)
        prompt_logprobs = body.prompt_logprobs
        if prompt_logprobs is None and body.echo:
            prompt_logprobs = body.logprobs
        sampling = body.to_sampling(
            max_tokens=1 if body.only_scores else body.max_tokens,
            prompt_logprobs=prompt_logprobs,
            bad_token_sequences=await _bad_sequences(tokenizer, body),
        )
        check_sampling(call.limits, sampling)
        check_choices(len(body.prompt), sampling.n)
        job = call.tokenizer_job(body.num_characters)
        keep = _kept_tokens(call, body, sampling)
        prompts = await self._threads.run(job, tokenizer, _encode, body, call.prefix, keep)
        generation = self._assemble(call, prompts, sampling, DEFAULT_COMPLETION_TOKENS)
        return replace(generation, only_scores=body.only_scores)

    async def _open(
        self, kind: str, param: str, principal: Principal, body: SamplingFields
    ) -> tuple[_Call, Tokenizer]:
        model = await self._catalog.resolve(principal, body.model)
        info = self.engine.info
        self.engine.refuse_unless_ready()
        if self._tokenizer is None or info is None:
            raise Unavailable(STARTING)
        call = _Call(
            id=f"{kind}-{uuid.uuid4().hex}",
            param=param,
            principal=principal,
            model=model,
            prefix=self._prefix(body, model),
            limits=ModelLimits.of(info),
            priority=body.priority or 0,
            fingerprint=f"fp_{info.model_revision[:FINGERPRINT_LENGTH]}",
        )
        return call, self._tokenizer

    def _assemble(
        self,
        call: _Call,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        default_tokens: int | None,
    ) -> Generation:
        """One request for each prompt, each with a seed, so that any engine gives its tokens."""
        base = call.prefix.prompt if call.prefix else None
        num_base_tokens = len(base.token_ids) if base else 0
        requests = []
        for number, prompt in enumerate(prompts):
            fitted = fit(call.limits, call.param, prompt.token_ids, sampling, default_tokens)
            seeded = msgspec.structs.replace(fitted, seed=self._seeds.of(sampling))
            requests.append(
                GenerateRequest(
                    request_id=f"{call.id}-{number}",
                    tenant=call.principal.tenant,
                    namespace=call.principal.namespace,
                    prompt_token_ids=prompt.token_ids[num_base_tokens:],
                    sampling=seeded,
                    adapter=call.model.adapter,
                    base_prompt=base.ref if base else None,
                    priority=call.priority,
                    call_id=call.id,
                )
            )
        return Generation(
            id=call.id,
            created=int(time.time()),
            model=call.model.name,
            prompts=list(prompts),
            requests=requests,
            tokenizer=self.tokenizer,
            fingerprint=call.fingerprint,
        )

    def _prefix(self, body: SamplingFields, model: Model) -> PromptPrefix | None:
        """With the base prompt that the request names, or else its model's."""
        is_named = body.base_prompt is not None
        name = body.base_prompt if is_named else model.base_prompt
        if name is None:
            return None
        prefix = PromptPrefix(self._base_prompts.resolve(name), is_named)
        _refuse_other_kind(prefix, body)
        return prefix


async def _bad_sequences(tokenizer: Tokenizer, body: SamplingFields) -> tuple[tuple[int, ...], ...]:
    if not body.bad_words:
        return ()
    return await asyncio.to_thread(bad_sequences, tokenizer, body.bad_words)


def _refuse_other_kind(prefix: PromptPrefix, body: SamplingFields) -> None:
    has_messages = bool(prefix.prompt.source.messages)
    if has_messages != isinstance(body, ChatCompletionRequest):
        kind = "messages, which begin chats" if has_messages else "a text, which begins completions"
        whose = "" if prefix.is_named else f" of the model '{body.model}'"
        raise InvalidRequest(
            f"The base prompt '{prefix.prompt.name}'{whose} is {kind} only.",
            "base_prompt" if prefix.is_named else "model",
        )


def _render(
    tokenizer: Tokenizer,
    body: ChatCompletionRequest,
    prefix: PromptPrefix | None,
    template: str | None,
    keep: int | None,
) -> Prompt:
    """Raises InvalidRequest where the template does not let the base prompt come first."""
    if body.skip_special_tokens is not False:
        refuse_hidden_stops(tokenizer, body.stop)
    own = [message.for_template() for message in body.messages]
    text = tokenizer.render_chat(
        own if prefix is None else prefix.chat(own),
        add_generation_prompt=body.add_generation_prompt is not False
        and not body.continue_final_message,
        variables=body.chat_template_kwargs,
        now=None if prefix is None else prefix.prompt.published_at,
        continues_last=body.continue_final_message is True,
        template=template,
    )
    adds_special = body.add_special_tokens is True
    if keep is not None:
        return Prompt(tokenizer.encode_end(text, keep, adds_special), "")
    token_ids = tokenizer.encode(text, adds_special)
    base = [] if prefix is None else prefix.prompt.token_ids
    if prefix is not None and token_ids[: len(base)] != base:
        raise InvalidRequest(
            f"With these messages and settings the chat template does not begin with the base "
            f"prompt '{prefix.prompt.name}'.",
            "messages",
        )
    return Prompt(token_ids, text)


def _encode(
    tokenizer: Tokenizer, body: CompletionRequest, prefix: PromptPrefix | None, keep: int | None
) -> list[Prompt]:
    """Raises InvalidRequest for special tokens that are to come behind a base prompt."""
    if body.skip_special_tokens is not False:
        refuse_hidden_stops(tokenizer, body.stop)
    if prefix is not None:
        if body.add_special_tokens:
            raise InvalidRequest(
                f"add_special_tokens cannot be true with the base prompt "
                f"'{prefix.prompt.name}', which begins with them.",
                "add_special_tokens",
            )
        prompts = [Prompt(prefix.completion(tokenizer, own), "") for own in body.prompt]
    else:
        adds_special = body.add_special_tokens is not False
        prompts = [_encoded(tokenizer, own, adds_special, keep) for own in body.prompt]
    if not body.echo:
        return prompts
    return [_for_echo(tokenizer, prompt, body.logprobs is not None) for prompt in prompts]


def _encoded(
    tokenizer: Tokenizer, own: str | list[int], adds_special: bool, keep: int | None
) -> Prompt:
    if isinstance(own, list):
        return Prompt(own if keep is None else own[-keep:], "")
    if keep is None:
        return Prompt(tokenizer.encode(own, adds_special), own)
    return Prompt(tokenizer.encode_end(own, keep, adds_special), "")


def _kept_tokens(call: _Call, body: SamplingFields, sampling: SamplingParams) -> int | None:
    """How many tokens a prompt may keep; None: all.

    Raises:
        InvalidRequest: for a prompt that begins with a base prompt, which is never cut.
    """
    wanted = body.truncate_prompt_tokens
    if wanted is not None and call.prefix is not None:
        name = call.prefix.prompt.name
        raise InvalidRequest(
            f"truncate_prompt_tokens cannot be given with the base prompt '{name}'.",
            "truncate_prompt_tokens",
        )
    if wanted != -1:
        return wanted
    answer = max(sampling.max_tokens or sampling.min_tokens, 1)
    return max(1, call.limits.max_model_len - answer)


def _for_echo(tokenizer: Tokenizer, prompt: Prompt, has_logprobs: bool) -> Prompt:
    text = prompt.text or tokenizer.decode(prompt.token_ids)
    return Prompt(
        token_ids=prompt.token_ids,
        text=text,
        first_token=tokenizer.decode(prompt.token_ids[:1], skip_special_tokens=False),
        offsets=tuple(tokenizer.offsets_in(prompt.token_ids, text)) if has_logprobs else (),
    )
