"""Failover: a call goes on in the next engine when the one that ran it ends."""

import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from loraplex.engine.client import EngineClient
from loraplex.engine.errors import EngineUnavailable, RequestRejected
from loraplex.engine.protocol import FailureCode, GenerateRequest, TokenEvent
from loraplex.platform.engines.call import Call
from loraplex.platform.engines.suspects import QUARANTINED, Suspects, Trial, Verdict

MAX_MOVES = 2

logger = logging.getLogger(__name__)


@dataclass
class FailoverStats:
    """Counts since the server's start."""

    moves: int = 0  # calls continued in another engine
    quarantined: int = 0  # calls that ended two engines


class Failover:
    """Generates as `EngineClient` does, and outlives the engine.

    When an engine ends, its running calls wait for the next engine and are sent there together with
    the tokens received so far. Callers see a pause and the same tokens.
    """

    def __init__(self, engine: EngineClient) -> None:
        self.stats = FailoverStats()
        self._engine = engine
        self._suspects = Suspects(engine.stats)

    async def generate(self, *requests: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """Yields the events of all choices of all requests, each token once, until each choice has
        had its last. Closing or cancelling the iterator aborts what still runs.

        Args:
            requests: with seeds.

        Raises:
            EngineUnavailable: if no engine is ready, if the call has used up its `MAX_MOVES`, or if
                the engine is given up.
            RequestRejected: as soon as one of the requests is refused or fails, and if this call
                has ended two engines.
        """
        call = Call(requests)
        self._engine.refuse_unless_ready()
        self._suspects.refuse_quarantined(call)
        is_suspect = self._suspects.resembles_one(call)
        while call.open_requests():
            try:
                async with contextlib.aclosing(self._attempt(call, is_suspect)) as events:
                    async for event in events:
                        yield event
            except EngineUnavailable:
                call.num_moves += 1
                if call.num_moves > MAX_MOVES or self._engine.is_given_up:
                    raise
                is_suspect = self._is_suspect(call)
                self.stats.moves += 1

    async def _attempt(self, call: Call, is_suspect: bool) -> AsyncGenerator[TokenEvent, None]:
        """Yields the events of one engine."""
        async with self._trial(call, is_suspect) as trial:
            await self._engine.wait_ready()
            call.engine = self._engine.times_ready
            if trial is not None:
                self._suspects.refuse_quarantined(call)
                trial.begin()
            async with contextlib.aclosing(self._engine.generate(*call.open_requests())) as events:
                async for event in events:
                    call.note(event)
                    if trial is not None:
                        trial.note(event)
                    yield event

    @contextlib.asynccontextmanager
    async def _trial(self, call: Call, is_suspect: bool) -> AsyncIterator[Trial | None]:
        if not is_suspect:
            yield None
            return
        async with self._suspects.trial(call) as trial:
            yield trial

    def _is_suspect(self, call: Call) -> bool:
        """Returns whether the call may have ended its engine.

        Raises:
            RequestRejected: if the call is known to have ended it.
        """
        verdict = self._suspects.judge(call)
        if verdict is Verdict.GUILTY:
            self.stats.quarantined += 1
            logger.error("A request was quarantined: the engine ended twice while it ran")
            raise RequestRejected(FailureCode.REQUEST_QUARANTINED, QUARANTINED)
        return verdict is Verdict.SUSPECT
