"""A call's requests: one per prompt, and no call with many prompts holds the event loop."""

import asyncio

import pytest
from support.models.word_tokenizer import word_tokenizer

from loraplex.engine.errors import RequestRejected
from loraplex.engine.model_limits import ModelLimits
from loraplex.engine.protocol import BasePromptRef
from loraplex.engine.request_seeds import RequestSeeds
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.auth.principal import Principal, TenantId
from loraplex.platform.catalog.base_prompts import BasePrompt, PromptSource
from loraplex.platform.catalog.service import Model
from loraplex.platform.inference.assembly import TOKENS_AT_ONCE, assemble
from loraplex.platform.inference.call_terms import CallTerms
from loraplex.platform.inference.generation import Generation, Prompt
from loraplex.platform.inference.prompts.prompt_prefix import PromptPrefix

pytestmark = pytest.mark.anyio

TOKENIZER = Tokenizer(word_tokenizer(), {}, {})
BASE = BasePrompt(
    "rules", 0, PromptSource("Be kind."), BasePromptRef(prompt_id="bpr_1", version=1), [5, 6]
)


def terms(prefix: PromptPrefix | None = None) -> CallTerms:
    return CallTerms(
        id="call",
        param="prompt",
        principal=Principal(TenantId("t"), "namespace", "key", frozenset()),
        model=Model("base", 0),
        prefix=prefix,
        limits=ModelLimits(max_model_len=4096, vocab_size=100, max_num_seqs=8),
        priority=0,
        fingerprint="fp",
        default_tokens=16,
    )


async def assembled(prompts: list[Prompt], prefix: PromptPrefix | None = None) -> Generation:
    return await assemble(terms(prefix), prompts, SamplingParams(), RequestSeeds(1), TOKENIZER)


async def test_each_prompt_is_a_request_with_a_seed_of_its_own() -> None:
    generation = await assembled([Prompt([1, 2], ""), Prompt([3], "")])

    first, second = generation.requests
    assert (first.request_id, second.request_id) == ("call-0", "call-1")
    assert (first.prompt_token_ids, second.prompt_token_ids) == ([1, 2], [3])
    assert first.sampling.max_tokens == second.sampling.max_tokens == 16
    assert None not in {first.sampling.seed, second.sampling.seed}
    assert first.sampling.seed != second.sampling.seed


async def test_a_base_prompt_is_sent_by_its_reference_only() -> None:
    generation = await assembled([Prompt([5, 6, 7], "")], PromptPrefix(BASE, is_named=True))

    (request,) = generation.requests
    assert (request.prompt_token_ids, request.base_prompt) == ([7], BASE.ref)


async def test_one_prompt_that_does_not_fit_refuses_the_call() -> None:
    with pytest.raises(RequestRejected, match="maximum context length is 4096"):
        await assembled([Prompt([1], ""), Prompt([1] * 4096, "")])


async def test_other_work_has_its_turn_between_pieces_of_many_prompts() -> None:
    prompts = [Prompt([1] * 2000, "")] * 200
    num_turns = 0

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    counting = asyncio.create_task(count_turns())
    await assembled(prompts)
    counting.cancel()

    num_pieces = 200 * 2000 // (TOKENS_AT_ONCE + 2000)
    assert num_turns >= num_pieces - 1  # between them
