"""PrefixLookup: how much of a sequence the KV pool has already."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from loraplex.engine.kv.block_pool import BlockPool, KVCacheBlock
from loraplex.engine.kv.keys import PrefixKeys, tokens_of
from loraplex.engine.kv.pinned_prompts import PinnedPrompt, PinnedPrompts
from loraplex.engine.kv.storage.groups import KVGroup
from loraplex.engine.kv.tiers import BlockKey, HostBlock, TierBlock
from loraplex.engine.sequence import Sequence

Look = Callable[[int], KVCacheBlock | TierBlock | None]
LowerFind = Callable[[BlockKey, tuple[int, ...]], TierBlock | None]


@dataclass(frozen=True)
class Fetch:
    """A block of a prefix in a lower tier, and its place in the table."""

    group: int
    index: int
    block: TierBlock


@dataclass(frozen=True)
class CachedPrefix:
    """Blocks that already hold the prefix of a sequence; no table holds them until the commit.

    A group may have blocks beyond `num_tokens`: the tokens in them are computed again, because
    another group lacks them, but need no second place in this group.
    """

    num_tokens: int  # that need not be computed
    blocks: list[list[KVCacheBlock]]  # per group; the null block where the window has passed
    end: tuple[KVCacheBlock, ...] = ()  # per group the last block of a base prompt, if any
    fetches: tuple[Fetch, ...] = ()  # these have the null block in `blocks`: they need a new one

    @property
    def awaited(self) -> list[TierBlock]:
        """Returns the blocks that are not in host memory yet; the prefix cannot be allocated before
        they are."""
        return [
            fetch.block
            for fetch in self.fetches
            if not isinstance(fetch.block, HostBlock) or not fetch.block.is_here
        ]


class PrefixLookup:
    """Finds blocks by the keys of a sequence, and the end of a base prompt without a key: a
    half-full block has none, and a whole one is not `num_cacheable` where no token follows it."""

    def __init__(
        self,
        pool: BlockPool,
        groups: list[KVGroup],
        block_size: int,
        keys: PrefixKeys,
        prompts: PinnedPrompts,
    ) -> None:
        self._pool = pool
        self._groups = groups
        self._block_size = block_size
        self._keys = keys
        self._prompts = prompts

    def find(self, sequence: Sequence, lower: LowerFind) -> CachedPrefix:
        """Returns the longest cached prefix of a sequence: whole blocks and the end of a base
        prompt, but never its last token, whose logits are needed. `lower` is asked for blocks that
        the device lacks."""
        self._keys.extend(sequence)
        limit = self.num_cacheable(sequence)
        looks = [
            self._look(sequence, group, min(limit, len(self._keys.of(sequence, group))), lower)
            for group in range(len(self._groups))
        ]
        num_blocks = self._agree(looks, limit)
        prompt = self._prompt_ending_in(sequence, num_blocks)
        if prompt is None or sequence.owes_prompt_logprobs:
            num_tokens = num_blocks * self._block_size
            rows, fetches = self._rows(looks, num_tokens, limit)
            return CachedPrefix(num_tokens, rows, fetches=fetches)
        num_tokens = min(prompt.num_tokens, sequence.num_tokens - 1)
        rows, fetches = self._rows(looks, num_tokens, num_blocks)
        return CachedPrefix(num_tokens, rows, prompt.end, fetches)

    def num_cacheable(self, sequence: Sequence) -> int:
        """Returns how many whole blocks may be cached ones: the last token is always computed."""
        if sequence.owes_prompt_logprobs:
            return 0
        return (sequence.num_tokens - 1) // self._block_size

    def _look(self, sequence: Sequence, group: int, end: int, lower: LowerFind) -> Look:
        """Looks up a group's block at an index below the end, each at most once."""
        keys = self._keys.of(sequence, group)

        @cache
        def look(index: int) -> KVCacheBlock | TierBlock | None:
            if index >= end:
                return None
            tokens = tokens_of(sequence, index, self._block_size)
            on_device = self._pool.find(group, keys[index], tokens)
            return on_device or lower((group, keys[index]), tokens)

        return look

    def _agree(self, looks: list[Look], limit: int) -> int:
        """Returns the largest number of blocks behind which every group can continue."""
        agreed = limit
        while True:
            num_blocks = agreed
            for group, look in zip(self._groups, looks, strict=True):
                agreed = group.state.usable_prefix(partial(_has, look), agreed, self._block_size)
            if agreed == num_blocks:
                return agreed

    def _rows(
        self, looks: list[Look], num_tokens: int, limit: int
    ) -> tuple[list[list[KVCacheBlock]], tuple[Fetch, ...]]:
        """Returns, for each group, the blocks that its window shows at `num_tokens`, and those that
        follow on the device without a gap, up to `limit` blocks."""
        rows: list[list[KVCacheBlock]] = []
        fetches: list[Fetch] = []
        needed = num_tokens // self._block_size
        for number, (group, look) in enumerate(zip(self._groups, looks, strict=True)):
            passed = group.state.num_skipped(num_tokens, self._block_size)
            row = [self._pool.null_block] * passed
            for index in range(passed, limit):
                block = look(index)
                if isinstance(block, KVCacheBlock):
                    row.append(block)
                elif block is not None and index < needed:
                    row.append(self._pool.null_block)
                    fetches.append(Fetch(number, index, block))
                else:
                    break
            rows.append(row)
        return rows, tuple(fetches)

    def _prompt_ending_in(self, sequence: Sequence, num_blocks: int) -> PinnedPrompt | None:
        """Returns the longest base prompt that begins the sequence and whose end is block
        `num_blocks`."""
        keys = sequence.block_keys
        if keys.num_public < num_blocks:
            return None
        ends = self._prompts.ending_behind(keys.base[num_blocks - 1] if num_blocks else None)
        start = num_blocks * self._block_size
        for prompt in sorted(ends, key=lambda prompt: -prompt.num_tokens):
            end = prompt.num_tokens
            if (
                start < sequence.num_tokens - 1
                and tuple(sequence.token_ids[start:end]) == prompt.token_ids[start:]
                and self._keys.is_base_up_to(sequence, end)
            ):
                return prompt
        return None


def _has(look: Look, index: int) -> bool:
    return look(index) is not None
