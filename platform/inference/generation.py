"""Generation: one API call, from its checked body to the engine's events."""

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from loraplex.engine.protocol import FinishReason, GenerateRequest, TokenEvent
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.engines.failover import Failover
from loraplex.platform.inference.load import Load


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    text: str
    first_token: str = ""  # text of the first token, if the prompt is echoed
    offsets: tuple[int, ...] = ()  # of the tokens in the text, if log-probabilities are shown


@dataclass(frozen=True)
class Generation:
    """One call, ready for an engine."""

    id: str
    created: int  # Unix seconds
    model: str
    prompts: list[Prompt]
    requests: list[GenerateRequest]  # one per prompt
    tokenizer: Tokenizer
    fingerprint: str  # of the model
    only_scores: bool = False  # whether the prompt's log-probabilities are the whole answer

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters, which the prompts share except for `max_tokens` and seed."""
        return self.requests[0].sampling

    @property
    def choices_per_prompt(self) -> int:
        return self.sampling.n


class ChoiceEvent(NamedTuple):
    prompt: int  # number of the prompt
    choice: int  # number of the choice, over all prompts
    event: TokenEvent


async def run(
    failover: Failover, generation: Generation, load: Load
) -> AsyncGenerator[ChoiceEvent, None]:
    """Yields the events of all prompts as they come; closing the generator aborts the requests.

    Raises:
        EngineError: as soon as one prompt fails; the others are aborted.
        ApiError: if the server is at its limit of choices.
    """
    requests, choices = generation.requests, generation.choices_per_prompt
    numbers = {request.request_id: number for number, request in enumerate(requests)}
    with load.hold(requests[0].tenant, choices * len(requests)):
        async with contextlib.aclosing(failover.generate(*requests)) as events:
            async for event in events:
                prompt = numbers[event.request_id]
                shown = _without_answer(event) if generation.only_scores else event
                yield ChoiceEvent(prompt, prompt * choices + event.index, shown)


def _without_answer(event: TokenEvent) -> TokenEvent:
    """Removes the one token that an engine generates at least, and that was not asked for."""
    usage = event.usage
    return msgspec.structs.replace(
        event,
        token_ids=[],
        text="",
        logprobs=None if event.logprobs is None else [],
        finish_reason=event.finish_reason and FinishReason.LENGTH,
        stop_reason=None,
        usage=None if usage is None else msgspec.structs.replace(usage, completion_tokens=0),
    )
