"""ChatRenderer: a call's events as chat completions."""

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from loraplex.platform.inference.answers.answer_options import AnswerOptions
from loraplex.platform.inference.answers.logprobs import chat_logprobs, prompt_logprobs
from loraplex.platform.inference.answers.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    Delta,
    Message,
    Usage,
)
from loraplex.platform.inference.answers.results import ChoiceResult, UsageTally
from loraplex.platform.inference.generation import ChoiceEvent, Generation


class ChatRenderer:
    """Renders one call, whole or in chunks."""

    def __init__(self, generation: Generation, options: AnswerOptions) -> None:
        self._generation = generation
        self._options = options
        self._usage: UnsetType | None = None if options.usage_at_end else UNSET
        self._started: set[int] = set()

    def whole(self, results: list[ChoiceResult], usage: Usage) -> ChatCompletion:
        logprobs_of_prompt = prompt_logprobs(results[0].prompt_logprobs)
        return ChatCompletion(
            id=self._generation.id,
            created=self._generation.created,
            model=self._generation.model,
            choices=[self._choice(index, result) for index, result in enumerate(results)],
            usage=usage,
            system_fingerprint=self._generation.fingerprint,
            prompt_token_ids=self._prompt_token_ids(),
            prompt_logprobs=UNSET if logprobs_of_prompt is None else logprobs_of_prompt,
        )

    def chunks(self, item: ChoiceEvent, tally: UsageTally) -> Iterator[ChatCompletionChunk]:
        event, as_ids = item.event, self._options.tokens_as_ids
        usage = tally.total if self._options.usage_in_chunks else None
        if item.choice not in self._started:
            is_first = not self._started
            self._started.add(item.choice)
            start = ChatChunkChoice(index=item.choice, delta=Delta("", "assistant"))
            yield self._chunk([start], usage, self._prompt_token_ids() if is_first else UNSET)
        has_ids = self._options.token_ids and bool(event.token_ids)
        if not (event.text or event.logprobs or event.finish_reason or has_ids):
            return
        choice = ChatChunkChoice(
            index=item.choice,
            delta=Delta(event.text) if event.text or event.logprobs else Delta(),
            logprobs=None if event.logprobs is None else chat_logprobs(event.logprobs, as_ids),
            finish_reason=event.finish_reason,
            stop_reason=UNSET if event.finish_reason is None else event.stop_reason,
            token_ids=event.token_ids if self._options.token_ids else UNSET,
        )
        yield self._chunk([choice], usage)

    def last(self, usage: Usage) -> ChatCompletionChunk:
        return self._chunk([], usage)

    def _choice(self, index: int, result: ChoiceResult) -> ChatChoice:
        as_ids, logprobs = self._options.tokens_as_ids, result.logprobs
        return ChatChoice(
            index=index,
            message=Message(result.text),
            logprobs=None if logprobs is None else chat_logprobs(logprobs, as_ids),
            finish_reason=result.finish_reason,
            stop_reason=result.stop_reason,
            token_ids=result.token_ids if self._options.token_ids else UNSET,
        )

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return self._generation.prompts[0].token_ids if self._options.token_ids else UNSET

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | None = None,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._generation.id,
            created=self._generation.created,
            model=self._generation.model,
            choices=choices,
            usage=usage or self._usage,
            system_fingerprint=self._generation.fingerprint,
            prompt_token_ids=prompt_token_ids,
        )
