"""CompletionRenderer: a call's events as text completions."""

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from loraplex.engine.protocol import PositionLogprobs
from loraplex.platform.inference.generation import ChoiceEvent, Generation
from loraplex.platform.inference.logprobs import completion_logprobs, prompt_logprobs
from loraplex.platform.inference.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
)
from loraplex.platform.inference.results import ChoiceResult

Positions = list[PositionLogprobs | None]


class CompletionRenderer:
    def __init__(self, generation: Generation, include_usage: bool, echo: bool) -> None:
        self._generation = generation
        self._usage: UnsetType | None = None if include_usage else UNSET
        self._echo = echo
        self._offsets: dict[int, int] = {}  # characters that each choice's tokens have so far
        self._prompt_positions: dict[int, Positions] = {}  # of each prompt

    def whole(self, results: list[ChoiceResult], usage: Usage) -> Completion:
        choices = [self._whole_choice(index, result) for index, result in enumerate(results)]
        return self._completion(choices, usage)

    def chunks(self, item: ChoiceEvent) -> Iterator[Completion]:
        event = item.event
        if event.prompt_logprobs is not None:
            self._prompt_positions[item.prompt] = event.prompt_logprobs
        is_first = item.choice not in self._offsets
        self._offsets.setdefault(item.choice, 0)
        text, positions = self._content(item.prompt, event.text, event.logprobs, is_first)
        if text or positions or event.finish_reason:
            choice = CompletionChoice(
                index=item.choice,
                text=text,
                logprobs=self._logprobs(item.prompt, item.choice, positions),
                finish_reason=event.finish_reason,
                stop_reason=UNSET if event.finish_reason is None else event.stop_reason,
            )
            yield self._completion([choice], self._usage)

    def last(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def _whole_choice(self, index: int, result: ChoiceResult) -> CompletionChoice:
        if result.prompt_logprobs is not None:
            self._prompt_positions[result.prompt] = result.prompt_logprobs
        text, positions = self._content(result.prompt, result.text, result.logprobs, True)
        logprobs_of_prompt = prompt_logprobs(result.prompt_logprobs)
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(result.prompt, index, positions),
            finish_reason=result.finish_reason,
            stop_reason=result.stop_reason,
            prompt_logprobs=UNSET if logprobs_of_prompt is None else logprobs_of_prompt,
        )

    def _content(
        self, prompt: int, text: str, logprobs: list[PositionLogprobs] | None, is_first: bool
    ) -> tuple[str, Positions | None]:
        """Text and positions to show; with the prompt before a choice's first, if it is echoed."""
        positions: Positions | None = None if logprobs is None else [*logprobs]
        if not (self._echo and is_first):
            return text, positions
        if positions is not None:
            positions = self._prompt_positions.get(prompt, []) + positions
        return self._generation.prompts[prompt].text + text, positions

    def _logprobs(
        self, prompt: int, choice: int, positions: Positions | None
    ) -> CompletionLogprobs | None:
        if positions is None:
            return None
        logprobs, self._offsets[choice] = completion_logprobs(
            positions, self._generation.prompts[prompt], self._offsets.get(choice, 0)
        )
        return logprobs

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        return Completion(
            id=self._generation.id,
            created=self._generation.created,
            model=self._generation.model,
            choices=choices,
            usage=usage,
        )
