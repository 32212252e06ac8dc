"""MemoryBudget: limits the bytes of bodies that the server holds at once."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass


@dataclass(eq=False)
class Room:
    """The bytes that one body holds or waits for."""

    tenant: str
    num_bytes: int
    turn: asyncio.Future[None]


class MemoryBudget:
    """First come, first served, except that a tenant at its own limit does not delay others.

    Args:
        max_bytes: limit on all bodies together.
        per_tenant: limit on one tenant's bodies.
    """

    def __init__(self, max_bytes: int, per_tenant: int) -> None:
        self._left = max_bytes
        self._per_tenant = per_tenant
        self._held: Counter[str] = Counter()
        self._waits: list[Room] = []

    @contextlib.asynccontextmanager
    async def hold(self, tenant: str, num_bytes: int) -> AsyncIterator[Room]:
        """Waits until there is room for a body, and holds it."""
        room = Room(tenant, num_bytes, asyncio.get_running_loop().create_future())
        self._waits.append(room)
        self._hand_out()
        try:
            await room.turn
            yield room
        finally:
            if room in self._waits:
                self._waits.remove(room)
            else:
                self.shrink(room, 0)
            self._hand_out()

    def shrink(self, room: Room, num_bytes: int) -> None:
        """Releases the bytes that a body does not need."""
        surplus = max(0, room.num_bytes - num_bytes)
        room.num_bytes -= surplus
        self._left += surplus
        self._held[room.tenant] -= surplus
        if not self._held[room.tenant]:
            del self._held[room.tenant]
        self._hand_out()

    def _hand_out(self) -> None:
        for wait in list(self._waits):
            if wait.turn.done():  # cancelled; its own task removes it
                continue
            if self._held[wait.tenant] + wait.num_bytes > self._per_tenant:
                continue
            if wait.num_bytes > self._left:
                return
            self._waits.remove(wait)
            self._left -= wait.num_bytes
            self._held[wait.tenant] += wait.num_bytes
            wait.turn.set_result(None)
