"""HostCache: adapters in host memory, evicted in least recently used order."""

import threading
from collections import OrderedDict

from loraplex.adapters.weights import LoRAWeights


class HostCache:
    """LoRAWeights by content digest, together at most `max_bytes`; the newest always stays.

    Safe for several threads: registrations fill it beside the engine.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._weights: OrderedDict[str, LoRAWeights] = OrderedDict()
        self._lock = threading.RLock()

    def __contains__(self, digest: str) -> bool:
        return digest in self._weights

    def __len__(self) -> int:
        return len(self._weights)

    def get(self, digest: str) -> LoRAWeights | None:
        """Returns the weights, which count as used now; None where they are not cached."""
        with self._lock:
            weights = self._weights.get(digest)
            if weights is not None:
                self._weights.move_to_end(digest)
            return weights

    def put(self, digest: str, weights: LoRAWeights) -> None:
        with self._lock:
            self.discard(digest)
            self._weights[digest] = weights
            self.num_bytes += weights.num_bytes
            while self.num_bytes > self.max_bytes and len(self._weights) > 1:
                self.discard(next(iter(self._weights)))

    def offer(self, digest: str, weights: LoRAWeights) -> None:
        """Caches weights that no request has needed yet, where there is room beside the others."""
        with self._lock:
            is_known = digest in self._weights
            if not is_known and self.num_bytes + weights.num_bytes <= self.max_bytes:
                self.put(digest, weights)

    def discard(self, digest: str) -> None:
        with self._lock:
            weights = self._weights.pop(digest, None)
            if weights is not None:
                self.num_bytes -= weights.num_bytes
