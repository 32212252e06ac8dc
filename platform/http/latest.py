"""Latest: content that is rendered once and reused for a while."""

import asyncio
from collections.abc import Awaitable, Callable


class Latest:
    """The latest rendering of some content.

    Args:
        render: makes the content.
        max_age: seconds for which a rendering is reused.
    """

    def __init__(self, render: Callable[[], Awaitable[bytes]], max_age: float) -> None:
        self._render = render
        self._max_age = max_age
        self._lock = asyncio.Lock()
        self._content = b""
        self._good_until = float("-inf")

    async def get(self) -> bytes:
        """Returns the content; concurrent callers wait for the same rendering."""
        async with self._lock:
            loop = asyncio.get_running_loop()
            if loop.time() >= self._good_until:
                self._content = await self._render()
                self._good_until = loop.time() + self._max_age
            return self._content
