"""InferenceService: a checked body becomes a Generation, or an error that says why not."""

import asyncio
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from loraplex.engine.client import STARTING, EngineClient
from loraplex.engine.protocol import GenerateRequest
from loraplex.engine.sampling_params import MAX_STOP_STRINGS, SamplingParams
from loraplex.engine.tokenizer import Tokenizer
from loraplex.platform.auth import Principal
from loraplex.platform.catalog.service import Catalog, Model
from loraplex.platform.errors import Unavailable
from loraplex.platform.inference.generation import Generation, Prompt
from loraplex.platform.inference.limits import Limits
from loraplex.platform.inference.sampling_fields import SamplingFields
from loraplex.platform.inference.schemas import (
    DEFAULT_COMPLETION_TOKENS,
    ChatCompletionRequest,
    CompletionRequest,
)

TOKENIZER_THREADS = 2


@dataclass(frozen=True)
class _Call:
    """What is known of a call before its prompt is tokenised."""

    id: str
    param: str  # which field holds the prompt
    principal: Principal
    model: Model
    limits: Limits
    priority: int


class InferenceService:
    """Resolves the model, tokenises, and checks what depends on both."""

    def __init__(self, engine: EngineClient, catalog: Catalog) -> None:
        self.engine = engine
        self._catalog = catalog
        self._tokenizer: Tokenizer | None = None
        self._folder: Path | None = None  # that it is from
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, "tokenizer")

    async def load_tokenizer(self, folder: Path) -> None:
        """To be awaited before requests are let through. The same folder again costs nothing.

        Raises:
            UnsupportedModel: if there is none to load.
        """
        if folder == self._folder:
            return
        loop = asyncio.get_running_loop()
        self._tokenizer = await loop.run_in_executor(self._threads, Tokenizer.from_folder, folder)
        self._folder = folder

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def chat(self, principal: Principal, body: ChatCompletionRequest) -> Generation:
        """Raises ApiError, or PromptRejected by the chat template."""
        call, tokenizer = self._open("chatcmpl", "messages", principal, body)
        sampling = body.to_sampling(
            max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=body.num_logprobs,
            stop=(*body.stop, *tokenizer.default_stop)[:MAX_STOP_STRINGS],
        )
        call.limits.check_sampling(sampling)
        loop = asyncio.get_running_loop()
        prompt = await loop.run_in_executor(self._threads, _render, tokenizer, body)
        return _assemble(call, [prompt], sampling, default_tokens=None)

    async def completion(self, principal: Principal, body: CompletionRequest) -> Generation:
        """Raises ApiError."""
        call, tokenizer = self._open("cmpl", "prompt", principal, body)
        prompt_logprobs = body.prompt_logprobs
        if prompt_logprobs is None and body.echo:
            prompt_logprobs = body.logprobs
        sampling = body.to_sampling(prompt_logprobs=prompt_logprobs)
        call.limits.check_sampling(sampling)
        loop = asyncio.get_running_loop()
        prompts = await loop.run_in_executor(self._threads, _encode, tokenizer, body)
        return _assemble(call, prompts, sampling, DEFAULT_COMPLETION_TOKENS)

    def _open(
        self, kind: str, param: str, principal: Principal, body: SamplingFields
    ) -> tuple[_Call, Tokenizer]:
        model = self._catalog.resolve(principal, body.model)
        info = self.engine.info
        if self._tokenizer is None or info is None or not self.engine.is_alive:
            raise Unavailable(STARTING)
        call = _Call(
            id=f"{kind}-{uuid.uuid4().hex}",
            param=param,
            principal=principal,
            model=model,
            limits=Limits.of(info),
            priority=body.priority or 0,
        )
        return call, self._tokenizer


def _render(tokenizer: Tokenizer, body: ChatCompletionRequest) -> Prompt:
    text = tokenizer.render_chat(
        [message.for_template() for message in body.messages],
        add_generation_prompt=body.add_generation_prompt is not False,
        variables=body.chat_template_kwargs,
    )
    return Prompt(tokenizer.encode(text, body.add_special_tokens is True), text)


def _encode(tokenizer: Tokenizer, body: CompletionRequest) -> list[Prompt]:
    prompts = [
        Prompt(tokenizer.encode(prompt, body.add_special_tokens is not False), prompt)
        if isinstance(prompt, str)
        else Prompt(prompt, "")
        for prompt in body.prompt
    ]
    return [_for_echo(tokenizer, prompt) for prompt in prompts] if body.echo else prompts


def _for_echo(tokenizer: Tokenizer, prompt: Prompt) -> Prompt:
    return Prompt(
        token_ids=prompt.token_ids,
        text=prompt.text or tokenizer.decode(prompt.token_ids),
        first_token=tokenizer.decode(prompt.token_ids[:1], skip_special_tokens=False),
    )


def _assemble(
    call: _Call, prompts: list[Prompt], sampling: SamplingParams, default_tokens: int | None
) -> Generation:
    requests = [
        GenerateRequest(
            request_id=f"{call.id}-{number}",
            tenant=call.principal.tenant,
            namespace=call.principal.namespace,
            prompt_token_ids=prompt.token_ids,
            sampling=call.limits.fit(call.param, prompt.token_ids, sampling, default_tokens),
            adapter=call.model.adapter,
            priority=call.priority,
        )
        for number, prompt in enumerate(prompts)
    ]
    return Generation(call.id, int(time.time()), call.model.name, prompts, requests)
