"""Load: limits the choices that run or wait, and estimates when there is room again."""

import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator

from loraplex.platform.errors import InvalidRequest, TooManyRequests

WINDOW_SECONDS = 60.0  # over which the rate of finished choices is measured
UNKNOWN_SECONDS = 10  # estimate if no choice has finished in that window
MAX_SECONDS = 300  # largest estimate


class Load:
    """Counts choices from the request to the end of the answer; one tenant may have three quarters
    of the limit.

    Args:
        max_choices: limit on choices that run or wait.
        clock: returns seconds.
    """

    def __init__(self, max_choices: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max = max_choices
        self._per_tenant = max_choices - max_choices // 4
        self._clock = clock
        self._held: Counter[str] = Counter()
        self._ends: deque[tuple[float, int]] = deque()

    def check(self, tenant: str, num_choices: int = 1) -> None:
        """Refuses choices for which there is no room.

        Raises:
            InvalidRequest: if there is never room for so many.
            TooManyRequests: with the estimated seconds, if there is no room now.
        """
        if num_choices > self._per_tenant:
            raise InvalidRequest(
                f"A request may ask for at most {self._per_tenant} choices, prompts times n, "
                f"got {num_choices}.",
                "n",
            )
        own = self._held[tenant] + num_choices - self._per_tenant
        excess = max(own, self._held.total() + num_choices - self._max)
        if excess > 0:
            whose, limit = ("Your", self._per_tenant) if own > 0 else ("The server's", self._max)
            raise TooManyRequests(
                f"{whose} requests have as many choices as may run or wait ({limit}); "
                "try again later.",
                self._seconds_until_free(excess),
            )

    @contextlib.contextmanager
    def hold(self, tenant: str, num_choices: int) -> Iterator[None]:
        """Counts choices until the context ends; raises as `check` does."""
        self.check(tenant, num_choices)
        self._held[tenant] += num_choices
        try:
            yield
        finally:
            self._held[tenant] -= num_choices
            if not self._held[tenant]:
                del self._held[tenant]
            self._ends.append((self._clock(), num_choices))
            self._forget_old_ends()

    def _seconds_until_free(self, num_choices: int) -> int:
        self._forget_old_ends()
        if not self._ends:
            return UNKNOWN_SECONDS
        seconds = max(1.0, self._clock() - self._ends[0][0])
        per_second = sum(count for _, count in self._ends) / seconds
        return min(MAX_SECONDS, max(1, math.ceil(num_choices / per_second)))

    def _forget_old_ends(self) -> None:
        while self._ends and self._ends[0][0] < self._clock() - WINDOW_SECONDS:
            self._ends.popleft()
