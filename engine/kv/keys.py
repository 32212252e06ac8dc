"""The keys of cached KV blocks, and which of them a sequence's blocks are found by."""

import hashlib
import struct
from collections.abc import Container
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from loraplex.engine.kv.storage.groups import KVGroup
from loraplex.engine.sequence import Sequence

BASE = b"base"  # the effective adapter of a block that no adapter has acted on
PUBLIC = None  # the namespace of blocks that everybody may share; no tenant's can be equal to it


@dataclass(frozen=True)
class BlockKeyScope:
    """What all blocks of one engine have in common."""

    kv_format: str  # identity of the `KVFormat`
    model_revision: str  # digest of the checkpoint
    quantization: str  # of the base model's weights
    numerics: str  # kernels, libraries and processor: whatever else can change a bit

    def key(
        self,
        parent: bytes | None,
        token_ids: TokenIds[int],
        namespace: str | None,
        adapter: bytes,
    ) -> bytes:
        """Returns SHA-256 over tagged, length-framed fields, so that no two lists of fields
        collide.

        Args:
            parent: key of the block before, None for the first.
            token_ids: the block's tokens, each below 2**32.
            namespace: whose requests may share it, set by the server; or `PUBLIC`.
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
        fields = (
            (b"format", self.kv_format),
            (b"model", self.model_revision),
            (b"quantization", self.quantization),
            (b"numerics", self.numerics),
        )
        return b"".join(_frame(tag, value.encode()) for tag, value in fields)


def _frame(tag: bytes, value: bytes) -> bytes:
    return struct.pack("<QQ", len(tag), len(value)) + tag + value


class PrefixKeys:
    """Extends a sequence's two chains of keys, and says which of them a KV group goes by.

    The base chain names blocks as the base model fills them, the adapted one as the sequence's
    adapter does. Up to the activation point the two are one. Behind it the base chain continues for
    the groups that lie wholly below the adapter's frontier: there the adapter changes nothing.

    A block is public where it and all blocks before it lie wholly inside a published base prompt
    and the base model fills them; every other block belongs to the sequence's namespace.
    """

    def __init__(
        self,
        scope: BlockKeyScope,
        block_size: int,
        groups: list[KVGroup],
        public: Container[bytes] = frozenset(),
    ) -> None:
        """`public`: the keys of the blocks of all published base prompts."""
        self._scope = scope
        self._block_size = block_size
        self._last_layers = [max(group.layers) for group in groups]
        self._public = public

    def extend(self, sequence: Sequence) -> None:
        """Names the sequence's blocks that have become full since the last call."""
        keys = sequence.block_keys
        for index in range(len(keys.adapted), sequence.num_tokens // self._block_size):
            adapter = self._effective_adapter(sequence, index * self._block_size)
            tokens = tokens_of(sequence, index, self._block_size)
            if adapter == BASE:
                keys.base.append(self._base_key(sequence, tokens))
                keys.adapted.append(keys.base[-1])
                continue
            if self.is_below(sequence, min(self._last_layers)):
                keys.base.append(self._base_key(sequence, tokens))
            parent = keys.adapted[-1] if keys.adapted else None
            keys.adapted.append(self._scope.key(parent, tokens, sequence.namespace, adapter))

    def of(self, sequence: Sequence, group: int) -> list[bytes]:
        """Returns the keys by which a group's blocks are found, one for each full block."""
        return self._chain(sequence, self._last_layers[group])

    def num_public(self, sequence: Sequence, group: int) -> int:
        """Returns how many leading blocks of a group belong to a published base prompt."""
        keys = sequence.block_keys
        public = keys.base[: keys.num_public]
        shared = zip(public, self.of(sequence, group), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], shared))

    def leading(self, sequence: Sequence) -> list[bytes]:
        """Returns the keys that decide how much need not be computed: those of the least shared
        group."""
        return self._chain(sequence, max(self._last_layers))

    def is_base_up_to(self, sequence: Sequence, num_tokens: int) -> bool:
        """Returns whether the base model fills the first `num_tokens` slots in all groups."""
        return (
            sequence.adapter is None
            or sequence.adapter_start >= num_tokens
            or self.is_below(sequence, max(self._last_layers))
        )

    @staticmethod
    def is_below(sequence: Sequence, layer: int) -> bool:
        """Returns whether the sequence's adapter leaves a layer's keys and values unchanged."""
        return layer < sequence.frontier

    def _chain(self, sequence: Sequence, layer: int) -> list[bytes]:
        keys = sequence.block_keys
        return keys.base if self.is_below(sequence, layer) else keys.adapted

    def _base_key(self, sequence: Sequence, tokens: tuple[int, ...]) -> bytes:
        keys = sequence.block_keys
        parent = keys.base[-1] if keys.base else None
        if keys.num_public == len(keys.base):
            key = self._scope.key(parent, tokens, PUBLIC, BASE)
            if key in self._public:
                keys.num_public += 1
                return key
        return self._scope.key(parent, tokens, sequence.namespace, BASE)

    def _effective_adapter(self, sequence: Sequence, start: int) -> bytes:
        """Returns what acts on the block that begins at `start`, and from which of its tokens on.

        Two prompts can agree on a block and yet activate the same adapter at different places in
        it, since later tokens decide which invocation is the last.
        """
        if sequence.adapter is None or sequence.adapter_start >= start + self._block_size:
            return BASE
        offset = max(0, sequence.adapter_start - start)
        return f"{sequence.adapter.digest}+{offset}".encode()


def tokens_of(sequence: Sequence, index: int, block_size: int) -> tuple[int, ...]:
    """Returns the tokens of the sequence's block at `index`."""
    return tuple(sequence.token_ids[index * block_size : (index + 1) * block_size])
