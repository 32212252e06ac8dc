"""RequestSeeds: the seed of each request, so that every engine run can be repeated."""

import hashlib
import struct
from itertools import count

from loraplex.engine.protocol import GenerateRequest


class RequestSeeds:
    """A request's own seed, or one drawn from the engine's seed in order of arrival."""

    def __init__(self, engine_seed: int) -> None:
        self._engine_seed = engine_seed
        self._arrivals = count()

    def of(self, request: GenerateRequest) -> int:
        if request.sampling.seed is not None:
            return request.sampling.seed
        drawn = struct.pack("<qq", self._engine_seed, next(self._arrivals))
        digest = hashlib.blake2b(drawn, digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)
