"""Unsent: the part of an answer that waits for a client that reads too slowly."""

import asyncio


class Unsent:
    """Bytes in order, up to a limit."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._changed = asyncio.Event()
        self._is_complete = False

    def add(self, piece: bytes) -> bool:
        """Whether the limit holds. A piece that is larger by itself may come alone."""
        if self._pieces and self._num_bytes + len(piece) > self._max_bytes:
            return False
        self._pieces.append(piece)
        self._num_bytes += len(piece)
        self._changed.set()
        return True

    def close(self) -> None:
        """Nothing more comes."""
        self._is_complete = True
        self._changed.set()

    async def take(self) -> bytes:
        """All that there is, as soon as there is something; empty at the end."""
        while not self._pieces and not self._is_complete:
            self._changed.clear()
            await self._changed.wait()
        content = b"".join(self._pieces)
        self._pieces.clear()
        self._num_bytes = 0
        return content
