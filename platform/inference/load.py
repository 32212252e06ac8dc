"""Load: how much runs and waits, how much may, and when there is room again."""

import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator

from loraplex.platform.errors import InvalidRequest, TooManyRequests

WINDOW_SECONDS = 60.0  # of which the ends tell how fast requests end
UNKNOWN_SECONDS = 10  # until there is room, where nothing has ended in that time
MAX_SECONDS = 300


class Load:
    """Counts choices from the request to the end of the answer. A tenant may have three quarters
    of what all may have together.

    Args:
        max_choices: that run or wait.
        clock: seconds.
    """

    def __init__(self, max_choices: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max = max_choices
        self._per_tenant = max_choices - max_choices // 4
        self._clock = clock
        self._held: Counter[str] = Counter()
        self._ends: deque[tuple[float, int]] = deque()

    def check(self, tenant: str, num_choices: int = 1) -> None:
        """
        Raises:
            InvalidRequest: if so many can never be taken.
            TooManyRequests: if they cannot be taken now, with the seconds until they can.
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
            whose = "Your requests" if own > 0 else "The server's requests"
            raise TooManyRequests(
                f"{whose} that run and wait are as many as may be; try again later.",
                self._seconds_until_free(excess),
            )

    @contextlib.contextmanager
    def hold(self, tenant: str, num_choices: int) -> Iterator[None]:
        """Counts them in. Raises as `check` does."""
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
