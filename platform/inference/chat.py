"""ChatRenderer: a call's events as chat completions."""

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from loraplex.platform.inference.generation import ChoiceEvent, Generation
from loraplex.platform.inference.logprobs import chat_logprobs, prompt_logprobs
from loraplex.platform.inference.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    Delta,
    Message,
    Usage,
)
from loraplex.platform.inference.results import ChoiceResult


class ChatRenderer:
    def __init__(self, generation: Generation, include_usage: bool) -> None:
        self._generation = generation
        self._usage: UnsetType | None = None if include_usage else UNSET
        self._started: set[int] = set()

    def whole(self, results: list[ChoiceResult], usage: Usage) -> ChatCompletion:
        logprobs_of_prompt = prompt_logprobs(results[0].prompt_logprobs)
        return ChatCompletion(
            id=self._generation.id,
            created=self._generation.created,
            model=self._generation.model,
            choices=[_choice(index, result) for index, result in enumerate(results)],
            usage=usage,
            prompt_logprobs=UNSET if logprobs_of_prompt is None else logprobs_of_prompt,
        )

    def chunks(self, item: ChoiceEvent) -> Iterator[ChatCompletionChunk]:
        event = item.event
        if item.choice not in self._started:
            self._started.add(item.choice)
            yield self._chunk([ChatChunkChoice(index=item.choice, delta=Delta("", "assistant"))])
        if not (event.text or event.logprobs or event.finish_reason):
            return
        choice = ChatChunkChoice(
            index=item.choice,
            delta=Delta(event.text) if event.text or event.logprobs else Delta(),
            logprobs=None if event.logprobs is None else chat_logprobs(event.logprobs),
            finish_reason=event.finish_reason,
            stop_reason=UNSET if event.finish_reason is None else event.stop_reason,
        )
        yield self._chunk([choice])

    def last(self, usage: Usage) -> ChatCompletionChunk:
        return self._chunk([], usage)

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | None = None
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._generation.id,
            created=self._generation.created,
            model=self._generation.model,
            choices=choices,
            usage=usage or self._usage,
        )


def _choice(index: int, result: ChoiceResult) -> ChatChoice:
    return ChatChoice(
        index=index,
        message=Message(result.text),
        logprobs=None if result.logprobs is None else chat_logprobs(result.logprobs),
        finish_reason=result.finish_reason,
        stop_reason=result.stop_reason,
    )
