"""The key of a cached KV block: all that its content depends on, and nothing a caller chooses."""

import hashlib
import struct
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field
from functools import cached_property

BASE = b"base"  # the effective adapter of a block that no adapter has acted on
PUBLIC = None  # the namespace of blocks that everybody may share; no tenant's can be equal to it


@dataclass
class BlockKeys:
    """The keys of one sequence's full blocks, in two chains; `PrefixKeys` extends them."""

    base: list[bytes] = field(default_factory=list)  # as the base model fills the blocks
    adapted: list[bytes] = field(default_factory=list)  # as the sequence's adapter does
    num_public: int = 0  # leading blocks of `base` that everybody may share

    def copy(self) -> "BlockKeys":
        return BlockKeys(list(self.base), list(self.adapted), self.num_public)


@dataclass(frozen=True)
class BlockKeyScope:
    """What all blocks of one engine have in common."""

    kv_format: str  # dtype and layout of the stored keys and values
    model_revision: str

    def key(
        self,
        parent: bytes | None,
        token_ids: TokenIds[int],
        namespace: str | None,
        adapter: bytes,
    ) -> bytes:
        """SHA-256 over tagged, length-framed fields, so that no two lists of fields can meet.

        Args:
            parent: key of the block before, None for the first.
            token_ids: the block's tokens, each below 2**32.
            namespace: who may share it, set by the server; or `PUBLIC`.
            adapter: digest of the adapter that acts on the block and where in it, or `BASE`.
        """
        space = (
            _frame(b"public", b"")
            if namespace is PUBLIC
            else _frame(b"namespace", namespace.encode())
        )
        fields = (
            _frame(b"parent", parent or b""),
            _frame(b"tokens", struct.pack(f"<{len(token_ids)}I", *token_ids)),
            space,
            _frame(b"adapter", adapter),
            self._constant,
        )
        return hashlib.sha256(b"".join(fields)).digest()

    @cached_property
    def _constant(self) -> bytes:
        kv_format, revision = self.kv_format.encode(), self.model_revision.encode()
        return _frame(b"format", kv_format) + _frame(b"model", revision)


def _frame(tag: bytes, value: bytes) -> bytes:
    return struct.pack("<QQ", len(tag), len(value)) + tag + value
