"""Accounting: reserves before a call's first event, and records its usage after the last."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from loraplex.engine.errors import EngineError
from loraplex.engine.protocol import TokenEvent
from loraplex.platform.auth.principal import Principal
from loraplex.platform.inference.generation import ChoiceEvent, Generation
from loraplex.platform.quotas.service import Demand, QuotaService
from loraplex.platform.usage.sink import Outcome, UsageEvent, UsageSink

Events = AsyncGenerator[ChoiceEvent, None]


class Accounting:
    """Reserves, counts and settles every call, however it ends."""

    def __init__(self, quotas: QuotaService, sink: UsageSink) -> None:
        self._quotas = quotas
        self._sink = sink

    async def account(self, principal: Principal, generation: Generation, events: Events) -> Events:
        """Yields a call's events unchanged, and records its usage when they end or are closed.

        Raises:
            TooManyRequests: before the first event, if the call asks for too much.
        """
        reservation = self._quotas.reserve(principal, _demand(generation))
        tally, started_at = _Tally(generation), time.time()
        outcome = Outcome.CLIENT_GONE
        try:
            async with aclosing(events):
                async for item in events:
                    tally.add(item)
                    yield item
            outcome = Outcome.COMPLETE
        except EngineError:
            outcome = Outcome.FAILED
            raise
        finally:
            self._quotas.settle(reservation)
            self._sink.record(
                UsageEvent(
                    call_id=generation.id,
                    tenant=principal.tenant,
                    key_id=principal.key_id,
                    model=generation.model,
                    prompt_tokens=tally.prompt_tokens,
                    cached_tokens=tally.cached_tokens,
                    completion_tokens=tally.completion_tokens,
                    outcome=outcome,
                    started_at=started_at,
                    finished_at=time.time(),
                )
            )


class _Tally:
    """Counts each prompt once, at its first event, and every generated token."""

    def __init__(self, generation: Generation) -> None:
        self._prompts = generation.prompts
        self._begun: set[int] = set()
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0

    def add(self, item: ChoiceEvent) -> None:
        event: TokenEvent = item.event
        self.completion_tokens += len(event.token_ids)
        if item.prompt not in self._begun:
            self._begun.add(item.prompt)
            self.prompt_tokens += len(self._prompts[item.prompt].token_ids)
            self.cached_tokens += event.cached_tokens or 0


def _demand(generation: Generation) -> Demand:
    limits = [request.sampling.max_tokens for request in generation.requests]
    choices = generation.choices_per_prompt
    known = [limit for limit in limits if limit is not None]
    return Demand(
        choices=len(limits) * choices,
        prompt_tokens=sum(len(prompt.token_ids) for prompt in generation.prompts),
        completion_tokens=sum(known) * choices if len(known) == len(limits) else None,
    )
