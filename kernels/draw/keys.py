"""draw_key: the randomness of one token, as a number."""

import hashlib
import struct


def draw_key(seed: int, choice: int, position: int) -> int:
    """Returns a signed 64-bit number that depends on its three arguments only."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, choice, position), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
