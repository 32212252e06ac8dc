"""Collects the events of a call: the result of each choice, and the usage of all."""

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from loraplex.engine.protocol import PositionLogprobs
from loraplex.platform.inference.answers.allowance import LogprobAllowance
from loraplex.platform.inference.answers.responses import PromptTokensDetails, Usage
from loraplex.platform.inference.generation import ChoiceEvent, Generation


@dataclass
class ChoiceResult:
    """One choice, which grows event by event."""

    prompt: int
    text: str = ""
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finish_reason: str = ""
    stop_reason: str | int | None = None
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    def add(self, item: ChoiceEvent) -> None:
        event = item.event
        self.pieces.append(event.text)
        self.token_ids += event.token_ids
        if event.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += event.logprobs
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        if event.finish_reason is not None:
            self.text = "".join(self.pieces)
            self.finish_reason = event.finish_reason.value
            self.stop_reason = event.stop_reason


class UsageTally:
    """Usage of a call, which counts each prompt once, however many choices it has."""

    def __init__(self, generation: Generation) -> None:
        self._prompt_tokens = sum(len(prompt.token_ids) for prompt in generation.prompts)
        self._completion_tokens: Counter[int] = Counter()  # of each choice
        self._cached_tokens = 0

    def add(self, item: ChoiceEvent) -> None:
        usage = item.event.usage
        self._completion_tokens[item.choice] += len(item.event.token_ids)
        if usage is not None:
            self._completion_tokens[item.choice] = usage.completion_tokens
            self._cached_tokens += usage.cached_tokens if item.event.index == 0 else 0

    @property
    def total(self) -> Usage:
        """Usage so far; cached tokens are known once a prompt's first choice has ended."""
        completion_tokens = self._completion_tokens.total()
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=self._prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(self._cached_tokens),
        )


async def collect(
    generation: Generation, events: AsyncIterator[ChoiceEvent]
) -> tuple[list[ChoiceResult], Usage]:
    """Reads a call to its end, and returns its choices and its usage.

    Raises:
        InvalidRequest: for more log-probabilities than the server holds until the end.
    """
    n = generation.choices_per_prompt
    results = [ChoiceResult(number // n) for number in range(n * len(generation.prompts))]
    tally, allowance = UsageTally(generation), LogprobAllowance()
    async for item in events:
        allowance.take(item.event)
        results[item.choice].add(item)
        tally.add(item)
    for result in results:
        result.prompt_logprobs = results[result.prompt * n].prompt_logprobs
    return results, tally.total
