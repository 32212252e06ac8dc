"""IdleCheck: proves the books of KV memory while the engine is idle."""

import time
from collections.abc import Callable

from loraplex.engine.kv.manager import KVCacheManager

MAX_SHARE = 0.01  # of the time


class IdleCheck:
    """Checks every block. That takes 0.2 seconds for 300,000 blocks, and a request that arrives
    meanwhile waits for it, so it must be rare."""

    def __init__(self, kv: KVCacheManager, clock: Callable[[], float] = time.monotonic) -> None:
        self._kv = kv
        self._clock = clock
        self._not_before = clock()

    def run(self) -> None:
        """Runs a check, unless the last one was too recent.

        Raises:
            RuntimeError: naming what is wrong.
        """
        start = self._clock()
        if start < self._not_before:
            return
        self._kv.check_integrity()
        end = self._clock()
        self._not_before = end + (end - start) / MAX_SHARE
