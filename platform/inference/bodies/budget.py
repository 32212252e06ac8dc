"""MemoryBudget: how many bytes of bodies the server holds at once."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass


@dataclass(eq=False)
class Room:
    """What one body takes up, or waits for."""

    tenant: str
    num_bytes: int
    turn: asyncio.Future[None]


class MemoryBudget:
    """First come, first served, but a tenant at its own limit holds up nobody else.

    Args:
        max_bytes: of all together.
        per_tenant: of one tenant.
    """

    def __init__(self, max_bytes: int, per_tenant: int) -> None:
        self._left = max_bytes
        self._per_tenant = per_tenant
        self._held: Counter[str] = Counter()
        self._waits: list[Room] = []

    @contextlib.asynccontextmanager
    async def hold(self, tenant: str, num_bytes: int) -> AsyncIterator[Room]:
        """Waits until there is room, and takes it up."""
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
        """Gives back what is not needed of a room that has been taken up."""
        surplus = max(0, room.num_bytes - num_bytes)
        room.num_bytes -= surplus
        self._left += surplus
        self._held[room.tenant] -= surplus
        if not self._held[room.tenant]:
            del self._held[room.tenant]
        self._hand_out()

    def _hand_out(self) -> None:
        for wait in list(self._waits):
            if wait.turn.done():  # it was cancelled, and leaves by itself
                continue
            if self._held[wait.tenant] + wait.num_bytes > self._per_tenant:
                continue
            if wait.num_bytes > self._left:
                return
            self._waits.remove(wait)
            self._left -= wait.num_bytes
            self._held[wait.tenant] += wait.num_bytes
            wait.turn.set_result(None)
