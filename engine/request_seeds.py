"""RequestSeeds: a seed for every request. Torch-free."""

import hashlib
import secrets
import struct
from itertools import count

from loraplex.engine.sampling_params import MAX_SEED, SamplingParams


class RequestSeeds:
    """Gives each request a seed: its own, or a drawn one.

    Args:
        seed: makes the drawn seeds a function of the order of arrival; None: they are drawn by the
            system's generator of secrets, so that no caller can foresee another's tokens.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self._arrivals = count()

    def of(self, sampling: SamplingParams) -> int:
        """Returns a seed for one request; a request with a seed of its own does not shift the seeds
        of others."""
        if sampling.seed is not None:
            return sampling.seed
        if self._seed is None:
            return secrets.randbits(64) - MAX_SEED - 1
        drawn = struct.pack("<qq", self._seed, next(self._arrivals))
        digest = hashlib.blake2b(drawn, digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)
