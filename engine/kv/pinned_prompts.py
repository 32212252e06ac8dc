"""PinnedPrompts: an operator's published prompts, computed once and shared by all tenants."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from loraplex.engine.kv.block_pool import KVCacheBlock
from loraplex.engine.kv.keys import BASE, PUBLIC, BlockKeyScope
from loraplex.engine.protocol import BasePromptRef
from loraplex.engine.sequence import Sequence


class PinnedPrompt:
    """One immutable version of one prompt, and the sequence whose blocks hold it."""

    def __init__(self, ref: BasePromptRef, sequence: Sequence, keys: list[bytes]) -> None:
        self.ref = ref
        self.sequence = sequence
        self.token_ids = tuple(sequence.token_ids)
        self.keys = keys  # of its full blocks
        self.end: tuple[KVCacheBlock, ...] = ()  # per group its last block, once computed
        self.is_ready = False  # computed, and its blocks kept
        self.is_retired = False  # taken by no new request

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_computed(self) -> bool:
        return self.sequence.is_finished and self.sequence.num_uncomputed_tokens == 0

    @property
    def is_lost(self) -> bool:
        """Returns whether its computation was given up."""
        return self.sequence.is_finished and self.sequence.num_uncomputed_tokens > 0

    def is_beginning_of(self, token_ids: list[int]) -> bool:
        return tuple(token_ids[: self.num_tokens]) == self.token_ids


class PinnedPrompts:
    """The published prompts, by name and by content.

    The keys of a prompt are known as soon as it is published, before its blocks are computed:
    sequences that need them meanwhile find them under the same keys, or compute them for all.
    """

    def __init__(self, scope: BlockKeyScope, block_size: int) -> None:
        self._scope = scope
        self._block_size = block_size
        self._prompts: dict[BasePromptRef, PinnedPrompt] = {}
        self._keys: Counter[bytes] = Counter()  # prompts that have a block
        self._by_key_before_end: dict[bytes | None, list[PinnedPrompt]] = defaultdict(list)

    def __contains__(self, key: object) -> bool:
        """Returns whether a key belongs to a block of a published prompt."""
        return key in self._keys

    def __iter__(self) -> Iterator[PinnedPrompt]:
        return iter(self._prompts.values())

    def __len__(self) -> int:
        return len(self._prompts)

    def get(self, ref: BasePromptRef) -> PinnedPrompt | None:
        return self._prompts.get(ref)

    def add(self, ref: BasePromptRef, sequence: Sequence) -> PinnedPrompt:
        """Publishes the prompt that `sequence` will compute; the name must be free."""
        prompt = PinnedPrompt(ref, sequence, self._keys_of(sequence.token_ids))
        self._prompts[ref] = prompt
        self._keys.update(prompt.keys)
        self._by_key_before_end[self._key_before_end(prompt)].append(prompt)
        return prompt

    def remove(self, prompt: PinnedPrompt) -> None:
        del self._prompts[prompt.ref]
        self._keys -= Counter(prompt.keys)
        key = self._key_before_end(prompt)
        self._by_key_before_end[key].remove(prompt)
        if not self._by_key_before_end[key]:
            del self._by_key_before_end[key]

    def beginning_of(self, token_ids: list[int]) -> PinnedPrompt | None:
        """Returns the longest prompt that the tokens begin with and that accepts requests."""
        begun = [
            prompt for prompt in self if not prompt.is_retired and prompt.is_beginning_of(token_ids)
        ]
        return max(begun, key=lambda prompt: prompt.num_tokens, default=None)

    def ending_behind(self, key: bytes | None) -> list[PinnedPrompt]:
        """Returns the computed prompts whose last block follows the block of this key; None: no
        block precedes it."""
        return [prompt for prompt in self._by_key_before_end.get(key, ()) if prompt.end]

    def _keys_of(self, token_ids: list[int]) -> list[bytes]:
        keys: list[bytes] = []
        for start in range(0, len(token_ids) - self._block_size + 1, self._block_size):
            tokens = token_ids[start : start + self._block_size]
            keys.append(self._scope.key(keys[-1] if keys else None, tokens, PUBLIC, BASE))
        return keys

    def _key_before_end(self, prompt: PinnedPrompt) -> bytes | None:
        num_before = (prompt.num_tokens - 1) // self._block_size
        return prompt.keys[num_before - 1] if num_before else None
