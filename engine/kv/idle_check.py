"""IdleCheck: proves the books of KV memory while the engine has nothing else to do."""

import time
from collections.abc import Callable

from loraplex.engine.kv.manager import KVCacheManager

MAX_SHARE = 0.01  # of the time


class IdleCheck:
    """Looks at every block, which takes 0.2 seconds for 300,000, so it must be rare: a request that
    comes meanwhile waits for it."""

    def __init__(self, kv: KVCacheManager, clock: Callable[[], float] = time.monotonic) -> None:
        self._kv = kv
        self._clock = clock
        self._not_before = clock()

    def run(self) -> None:
        """Checks, unless the last check was too short a time ago.

        Raises:
            RuntimeError: naming what is wrong.
        """
        start = self._clock()
        if start < self._not_before:
            return
        self._kv.check_integrity()
        end = self._clock()
        self._not_before = end + (end - start) / MAX_SHARE
