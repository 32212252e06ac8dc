"""Generation: one API call on its way, from checked body to the engine's events."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import NamedTuple

from loraplex.engine.client import EngineClient
from loraplex.engine.protocol import GenerateRequest, TokenEvent


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    text: str
    first_token: str = ""  # the first token's text, where the prompt is to be echoed


@dataclass(frozen=True)
class Generation:
    id: str
    created: int  # Unix seconds
    model: str
    prompts: list[Prompt]
    requests: list[GenerateRequest]  # one per prompt

    @property
    def choices_per_prompt(self) -> int:
        return self.requests[0].sampling.n


class ChoiceEvent(NamedTuple):
    prompt: int  # which prompt
    choice: int  # which choice, counted over all prompts
    event: TokenEvent


async def run(engine: EngineClient, generation: Generation) -> AsyncGenerator[ChoiceEvent, None]:
    """Yields the events of all prompts as they come. Closing it aborts what still runs.

    Raises:
        EngineError: as soon as one prompt fails; the others are aborted.
    """
    inbox: asyncio.Queue[ChoiceEvent | Exception | None] = asyncio.Queue()
    readers = [
        asyncio.create_task(_read(engine, generation, number, inbox))
        for number in range(len(generation.requests))
    ]
    try:
        open_prompts = len(readers)
        while open_prompts:
            item = await inbox.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_prompts -= 1
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(
    engine: EngineClient,
    generation: Generation,
    prompt: int,
    inbox: "asyncio.Queue[ChoiceEvent | Exception | None]",
) -> None:
    first = prompt * generation.choices_per_prompt
    try:
        async with contextlib.aclosing(engine.generate(generation.requests[prompt])) as events:
            async for event in events:
                inbox.put_nowait(ChoiceEvent(prompt, first + event.index, event))
    except Exception as error:
        inbox.put_nowait(error)
    else:
        inbox.put_nowait(None)
