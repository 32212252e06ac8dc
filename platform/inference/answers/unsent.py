"""Unsent: a bounded buffer for a client that reads too slowly."""

import asyncio


class Unsent:
    """Unsent bytes in order, up to a limit."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._changed = asyncio.Event()
        self._is_complete = False

    def add(self, piece: bytes) -> bool:
        """Appends a piece, and returns whether it fits; a single piece always does."""
        if self._pieces and self._num_bytes + len(piece) > self._max_bytes:
            return False
        self._pieces.append(piece)
        self._num_bytes += len(piece)
        self._changed.set()
        return True

    def close(self) -> None:
        """Marks the answer as complete."""
        self._is_complete = True
        self._changed.set()

    async def take(self) -> bytes:
        """Waits for content and returns all of it; empty at the end."""
        while not self._pieces and not self._is_complete:
            self._changed.clear()
            await self._changed.wait()
        content = b"".join(self._pieces)
        self._pieces.clear()
        self._num_bytes = 0
        return content
