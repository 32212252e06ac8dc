"""AdapterLoader: loads stored adapters into host memory on a thread of its own."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from loraplex.adapters.errors import AdapterError, AdapterUnavailable
from loraplex.adapters.residency.host_cache import HostCache
from loraplex.adapters.weights import LoRAWeights

_RETRY_SECONDS = 1.0
_GUESSED_SECONDS = 0.05

logger = logging.getLogger(__name__)


class AdapterLoader:
    """Starts loads and collects them without waiting. Used by the engine's thread only.

    Args:
        cache: where loaded adapters are kept.
        clock: seconds that only grow.
    """

    def __init__(self, cache: HostCache, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_loads = 0
        self._seconds: dict[str, float] = {}
        self._cache = cache
        self._clock = clock
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-load")
        self._loading: dict[str, Future[LoRAWeights]] = {}
        self._failed: dict[str, tuple[float, AdapterError]] = {}  # when, and why

    def ready(self, digest: str, load: Callable[[], LoRAWeights]) -> bool:
        """Returns whether an adapter is in host memory; if not, makes sure that `load` is under
        way."""
        self._collect()
        if self._cache.get(digest) is not None:
            return True
        if digest not in self._loading and self.error(digest) is None:
            self._failed.pop(digest, None)
            self._loading[digest] = self._threads.submit(self._timed, digest, load)
        return False

    def seconds(self, digest: str) -> float:
        """Returns the duration of its last load; a guess where there was none."""
        return self._seconds.get(digest, _GUESSED_SECONDS)

    def error(self, digest: str) -> AdapterError | None:
        """Returns why the last load failed, until it may be retried a second later."""
        self._collect()
        when, error = self._failed.get(digest, (0.0, None))
        return error if error is not None and self._clock() < when + _RETRY_SECONDS else None

    def forget(self, digest: str) -> None:
        """Drops an adapter, and the result of a load that is under way."""
        self._loading.pop(digest, None)
        self._failed.pop(digest, None)
        self._seconds.pop(digest, None)
        self._cache.discard(digest)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _timed(self, digest: str, load: Callable[[], LoRAWeights]) -> LoRAWeights:
        start = self._clock()
        weights = load()
        self._seconds[digest] = self._clock() - start
        return weights

    def _collect(self) -> None:
        for digest, future in list(self._loading.items()):
            if not future.done():
                continue
            del self._loading[digest]
            error = future.exception()
            if error is None:
                self._cache.put(digest, future.result())
                self.num_loads += 1
            else:
                self._failed[digest] = (self._clock(), _as_adapter_error(error))


def _as_adapter_error(error: BaseException) -> AdapterError:
    """Returns the error that an owner sees; a failure of one adapter, of whatever kind, is not the
    engine's."""
    if isinstance(error, AdapterError):
        return error
    logger.error("an adapter could not be loaded", exc_info=error)
    return AdapterUnavailable("the adapter could not be loaded")
