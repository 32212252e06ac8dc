"""Suspects: finds the call that ended an engine among those that ran in it."""

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from enum import Enum, auto
from heapq import heappop, heappush
from itertools import count

from loraplex.engine.errors import EngineError, EngineUnavailable, RequestRejected
from loraplex.engine.protocol import FailureCode, TokenEvent
from loraplex.platform.engines.call import Call

PROOF = 2  # tokens of each choice: the one that was due at the end, and one that may have been lost
MAX_TRIAL_SECONDS = 10.0  # then the next call is tried, if the engine still responds
QUARANTINE_SECONDS = 3600.0
MAX_QUARANTINED = 10_000
MAX_LIVES = 4  # engines whose end some calls may still have to handle
QUARANTINED = (
    "The engine ended twice while it ran this request, so the request is not tried again; "
    "identical requests are refused for an hour."
)


class Verdict(Enum):
    SUSPECT = auto()  # the call may have ended the engine, and must be tried alone
    INNOCENT = auto()  # another call ended the engine
    GUILTY = auto()


class Suspects:
    """Separates the call that ends every engine from those that ran beside it.

    After an engine's end every call that ran in it is a suspect. The next engine gets the suspects
    one at a time: each is on trial until it has advanced beyond the point of that end, or has
    finished. Then it is innocent and runs beside the others. If an engine ends during a trial, the
    call on trial is guilty. Calls without a token come last, since most of what ends an engine does
    so at once.

    Args:
        probe: awaited to check that the engine's loop still runs.
        clock: returns seconds.
    """

    def __init__(
        self, probe: Callable[[], Awaitable[object]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.probe = probe
        self._clock = clock
        self._unproved: OrderedDict[int, set[Call]] = OrderedDict()  # by engine
        self._quarantined: OrderedDict[bytes, float] = OrderedDict()  # fingerprint -> until when
        self._suspected: Counter[bytes] = Counter()  # fingerprints
        self._arrivals = count()
        self._waiting: list[tuple[bool, int, asyncio.Future[None]]] = []
        self._is_trying = False

    def refuse_quarantined(self, call: Call) -> None:
        """Raises RequestRejected for a call that equals one that ended two engines."""
        if self._quarantined and self._quarantined.get(call.fingerprint, 0.0) > self._clock():
            raise RequestRejected(FailureCode.REQUEST_QUARANTINED, QUARANTINED)

    def resembles_one(self, call: Call) -> bool:
        """Returns whether the call equals a suspect."""
        return bool(self._suspected) and call.fingerprint in self._suspected

    def judge(self, call: Call) -> Verdict:
        """Returns what the end of its engine says about a call; a guilty call is quarantined."""
        unproved = self._unproved.get(call.engine, set())
        if unproved == {call}:
            self._quarantine(call)
            return Verdict.GUILTY
        return Verdict.INNOCENT if unproved and call not in unproved else Verdict.SUSPECT

    @contextlib.asynccontextmanager
    async def trial(self, call: Call) -> AsyncIterator["Trial"]:
        """Waits until no other call is on trial, and begins the call's trial."""
        self._suspected[call.fingerprint] += 1
        try:
            await self._take_turn(call)
            trial = Trial(call, self)
            try:
                yield trial
            except EngineUnavailable:
                raise  # to be judged
            except BaseException:
                trial.withdraw()
                raise
            finally:
                trial.pass_turn()
        finally:
            self._suspected -= Counter([call.fingerprint])

    def unproved_in(self, engine: int) -> set[Call]:
        """Returns the calls on trial in an engine that are not proved innocent yet."""
        unproved = self._unproved.setdefault(engine, set())
        while len(self._unproved) > MAX_LIVES:
            self._unproved.popitem(last=False)
        return unproved

    def give_turn(self) -> None:
        """Begins the next trial."""
        self._is_trying = False
        while self._waiting and not self._is_trying:
            _, _, turn = heappop(self._waiting)
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
                self._is_trying = True

    async def _take_turn(self, call: Call) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (not call.has_tokens, next(self._arrivals), turn))
        if not self._is_trying:
            self.give_turn()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn had just been given
                self.give_turn()
            raise

    def _quarantine(self, call: Call) -> None:
        self._quarantined[call.fingerprint] = self._clock() + QUARANTINE_SECONDS
        while len(self._quarantined) > MAX_QUARANTINED:
            self._quarantined.popitem(last=False)


class Trial:
    """The trial of one call in one engine."""

    def __init__(self, call: Call, suspects: Suspects) -> None:
        self._call = call
        self._suspects = suspects
        self._unproved: set[Call] = set()
        self._has_turn = True
        self._tokens: Counter[tuple[str, int]] = Counter()
        self._timing: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Starts the trial, just before the call is sent to its engine."""
        self._unproved = self._suspects.unproved_in(self._call.engine)
        self._unproved.add(self._call)
        self._timing = asyncio.create_task(self._end_in_time())

    def note(self, event: TokenEvent) -> None:
        """Records an event that the call has already recorded."""
        if self._call in self._unproved:
            self._tokens[event.request_id, event.index] += 1
            if all(self._tokens[choice] >= PROOF for choice in self._call.open_choices()):
                self.withdraw()
                self.pass_turn()

    def withdraw(self) -> None:
        """Clears the call of suspicion."""
        self._unproved.discard(self._call)

    def pass_turn(self) -> None:
        """Ends this trial and begins the next, once."""
        if self._timing is not None and self._timing is not asyncio.current_task():
            self._timing.cancel()
        if self._has_turn:
            self._has_turn = False
            self._suspects.give_turn()

    async def _end_in_time(self) -> None:
        """Ends a trial that waits in the engine for long, for example for its tenant's turn."""
        await asyncio.sleep(MAX_TRIAL_SECONDS)
        with contextlib.suppress(EngineError):
            await self._suspects.probe()
            self.pass_turn()
