"""The key of a cached KV block: all that its content depends on, and nothing a caller chooses."""

import hashlib
import struct
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass

import numpy as np

BASE = b"base"  # the effective adapter of a block that no adapter has acted on


@dataclass(frozen=True)
class BlockKeyScope:
    """What all blocks of one engine have in common."""

    kv_format: str  # dtype and layout of the stored keys and values
    model_revision: str

    def key(
        self, parent: bytes | None, token_ids: TokenIds[int], namespace: str, adapter: bytes
    ) -> bytes:
        """SHA-256 over tagged, length-framed fields, so that no two lists of fields can meet.

        Args:
            parent: key of the block before, None for the first.
            token_ids: the block's tokens, each below 2**32.
            namespace: who may share it; set by the server.
            adapter: digest of the adapter that acts on the block and where in it, or `BASE`.
        """
        digest = hashlib.sha256()
        for tag, value in (
            (b"parent", parent or b""),
            (b"tokens", np.asarray(token_ids, dtype="<u4").tobytes()),
            (b"namespace", namespace.encode()),
            (b"adapter", adapter),
            (b"format", self.kv_format.encode()),
            (b"model", self.model_revision.encode()),
        ):
            digest.update(struct.pack("<QQ", len(tag), len(value)))
            digest.update(tag)
            digest.update(value)
        return digest.digest()
