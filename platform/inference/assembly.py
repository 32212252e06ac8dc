"""assemble: builds the engine's requests of a call without holding the event loop."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import msgspec

from loraplex.engine.protocol import GenerateRequest
from loraplex.engine.request_seeds import RequestSeeds
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.inference.call_terms import CallTerms
from loraplex.platform.inference.generation import Generation, Prompt
from loraplex.platform.inference.limits import fit

TOKENS_AT_ONCE = 2**15  # of prompts that are checked before other work has its turn


async def assemble(
    terms: CallTerms,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    seeds: RequestSeeds,
    tokenizer: Tokenizer,
) -> Generation:
    """Returns a generation with one request per prompt, each with a seed of its own, so that any
    engine gives the same tokens.

    Raises:
        RequestRejected: if a prompt is empty, or does not fit together with its answer.
    """
    requests = [
        _request(terms, number, prompt, sampling, seeds)
        async for number, prompt in _by_turns(prompts)
    ]
    return Generation(
        id=terms.id,
        created=int(time.time()),
        model=terms.model.name,
        prompts=list(prompts),
        requests=requests,
        tokenizer=tokenizer,
        fingerprint=terms.fingerprint,
    )


async def _by_turns(prompts: Sequence[Prompt]) -> AsyncIterator[tuple[int, Prompt]]:
    """Yields numbered prompts, and the event loop to other tasks between pieces of work."""
    num_tokens = 0
    for number, prompt in enumerate(prompts):
        yield number, prompt
        num_tokens += len(prompt.token_ids)
        if num_tokens >= TOKENS_AT_ONCE:
            num_tokens = 0
            await asyncio.sleep(0)


def _request(
    terms: CallTerms, number: int, prompt: Prompt, sampling: SamplingParams, seeds: RequestSeeds
) -> GenerateRequest:
    base = terms.prefix.prompt if terms.prefix else None
    own = prompt.token_ids[len(base.token_ids) :] if base else prompt.token_ids
    fitted = fit(terms.limits, terms.param, prompt.token_ids, sampling, terms.default_tokens)
    return GenerateRequest(
        request_id=f"{terms.id}-{number}",
        tenant=terms.principal.tenant,
        namespace=terms.principal.namespace,
        prompt_token_ids=own,
        sampling=msgspec.structs.replace(fitted, seed=seeds.of(sampling)),
        adapter=terms.model.adapter,
        base_prompt=base.ref if base else None,
        priority=terms.priority,
        call_id=terms.id,
    )
