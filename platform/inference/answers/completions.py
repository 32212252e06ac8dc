"""CompletionRenderer: a call's events as text completions."""

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from loraplex.engine.protocol import PositionLogprobs
from loraplex.engine.text.text_offsets import TextOffsets
from loraplex.platform.inference.answers.answer_options import AnswerOptions
from loraplex.platform.inference.answers.logprobs import (
    completion_logprobs,
    id_text,
    prompt_logprobs,
)
from loraplex.platform.inference.answers.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
)
from loraplex.platform.inference.answers.results import ChoiceResult, UsageTally
from loraplex.platform.inference.generation import ChoiceEvent, Generation

Positions = list[PositionLogprobs | None]


class CompletionRenderer:
    """Renders one call, whole or in chunks."""

    def __init__(self, generation: Generation, options: AnswerOptions) -> None:
        self._generation = generation
        self._options = options
        self._usage: UnsetType | None = None if options.usage_at_end else UNSET
        self._offsets: dict[int, TextOffsets] = {}  # of each choice's tokens
        self._started: set[int] = set()
        self._prompt_positions: dict[int, Positions] = {}  # of each prompt

    def whole(self, results: list[ChoiceResult], usage: Usage) -> Completion:
        choices = [self._whole_choice(index, result) for index, result in enumerate(results)]
        return self._completion(choices, usage)

    def chunks(self, item: ChoiceEvent, tally: UsageTally) -> Iterator[Completion]:
        event = item.event
        if event.prompt_logprobs is not None:
            self._prompt_positions[item.prompt] = event.prompt_logprobs
        is_first = item.choice not in self._started
        self._started.add(item.choice)
        prompt, is_echo = self._generation.prompts[item.prompt], self._options.echo and is_first
        text = (prompt.text if is_echo else "") + event.text
        shows_ids = self._options.token_ids
        if not (text or event.logprobs or event.finish_reason or (shows_ids and event.token_ids)):
            return
        choice = CompletionChoice(
            index=item.choice,
            text=text,
            logprobs=self._logprobs(item.prompt, item.choice, event.logprobs, is_echo),
            finish_reason=event.finish_reason,
            stop_reason=UNSET if event.finish_reason is None else event.stop_reason,
            token_ids=event.token_ids if shows_ids else UNSET,
            prompt_token_ids=prompt.token_ids if shows_ids and is_first else UNSET,
        )
        yield self._completion(
            [choice], tally.total if self._options.usage_in_chunks else self._usage
        )

    def last(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def _whole_choice(self, index: int, result: ChoiceResult) -> CompletionChoice:
        if result.prompt_logprobs is not None:
            self._prompt_positions[result.prompt] = result.prompt_logprobs
        prompt, is_echo = self._generation.prompts[result.prompt], self._options.echo
        logprobs_of_prompt = prompt_logprobs(result.prompt_logprobs)
        return CompletionChoice(
            index=index,
            text=(prompt.text if is_echo else "") + result.text,
            logprobs=self._logprobs(result.prompt, index, result.logprobs, is_echo),
            finish_reason=result.finish_reason,
            stop_reason=result.stop_reason,
            prompt_logprobs=UNSET if logprobs_of_prompt is None else logprobs_of_prompt,
            token_ids=result.token_ids if self._options.token_ids else UNSET,
            prompt_token_ids=prompt.token_ids if self._options.token_ids else UNSET,
        )

    def _logprobs(
        self, prompt: int, choice: int, positions: list[PositionLogprobs] | None, is_echo: bool
    ) -> CompletionLogprobs | None:
        """Returns the log-probabilities of some tokens, behind the prompt's if it is echoed."""
        if positions is None:
            return None
        source = self._generation.prompts[prompt]
        follow = self._offsets.get(choice)
        if follow is None:
            follow = self._offsets[choice] = self._generation.tokenizer.text_offsets(
                source.token_ids, self._generation.sampling.skip_special_tokens
            )
        start = len(source.text) if self._options.echo else 0
        offsets = [start + follow.add(position.chosen.token_id) for position in positions]
        before = self._prompt_positions.get(prompt, []) if is_echo else []
        as_ids = self._options.tokens_as_ids
        return completion_logprobs(
            [*before, *positions],
            [*source.offsets[: len(before)], *offsets],
            id_text(source.token_ids[0]) if as_ids else source.first_token,
            as_ids,
        )

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        return Completion(
            id=self._generation.id,
            created=self._generation.created,
            model=self._generation.model,
            choices=choices,
            usage=usage,
            system_fingerprint=self._generation.fingerprint,
        )
