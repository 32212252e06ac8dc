"""Turns: a few places that tenants take in turns, so that no tenant holds all."""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator


class Turns:
    """Places for work, first come, first served within a tenant, and round robin between tenants.

    Args:
        num_places: number of places.
        per_tenant: number of places that one tenant may hold.
    """

    def __init__(self, num_places: int, per_tenant: int) -> None:
        self._free = num_places
        self._per_tenant = per_tenant
        self._taken: Counter[str] = Counter()
        self._last = ""  # the tenant that took the last place
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the next tenant comes first

    @contextlib.asynccontextmanager
    async def take(self, tenant: str) -> AsyncIterator[None]:
        """Waits for a place, and holds it until the context ends."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._hand_out()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._free += 1
                self._taken[tenant] -= 1
                if not self._taken[tenant]:
                    del self._taken[tenant]
            self._hand_out()

    def _hand_out(self) -> None:
        for tenant in sorted(self._waiting, key=lambda it: it == self._last):
            queue = self._waiting[tenant]
            while queue and queue[0].done():  # cancelled
                queue.popleft()
            if queue and self._free and self._taken[tenant] < self._per_tenant:
                self._free -= 1
                self._taken[tenant] += 1
                self._last = tenant
                queue.popleft().set_result(None)
                self._waiting[tenant] = self._waiting.pop(tenant)  # behind the others
            if not queue:
                self._waiting.pop(tenant, None)
