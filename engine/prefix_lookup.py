"""PrefixLookup: how much of a sequence is in the KV pool already."""

from dataclasses import dataclass
from itertools import takewhile

from loraplex.engine.base_prompts import BasePrompt, BasePrompts
from loraplex.engine.block_pool import NULL_BLOCK_ID, BlockPool, KVCacheBlock
from loraplex.engine.kv_groups import KVGroup
from loraplex.engine.prefix_keys import PrefixKeys, tokens_of
from loraplex.engine.sequence import Sequence

Row = list[KVCacheBlock | None]


@dataclass(frozen=True)
class CachedPrefix:
    """Blocks that already hold the beginning of a sequence; nobody's until they are allocated.

    A group may have blocks beyond `num_tokens`: the tokens in them are computed again, because
    another group lacks them, but need no second place in this group.
    """

    num_tokens: int  # that need not be computed
    blocks: list[list[KVCacheBlock]]  # per group; the null block where the window has passed
    half: tuple[KVCacheBlock, ...] = ()  # per group the half-full end of a base prompt, if any

    @property
    def num_blocks(self) -> int:
        """Blocks that need not be allocated; the half-full ones are copied."""
        return sum(block.block_id != NULL_BLOCK_ID for row in self.blocks for block in row)


class PrefixLookup:
    """Finds blocks by the keys of a sequence, and the half-full end of a base prompt."""

    def __init__(
        self,
        pool: BlockPool,
        groups: list[KVGroup],
        block_size: int,
        keys: PrefixKeys,
        prompts: BasePrompts,
    ) -> None:
        self._pool = pool
        self._groups = groups
        self._block_size = block_size
        self._keys = keys
        self._prompts = prompts

    def find(self, sequence: Sequence) -> CachedPrefix:
        """The longest cached beginning of a sequence: whole blocks and the end of a base prompt,
        but never its last token, whose logits are needed."""
        self._keys.extend(sequence)
        limit = self.num_cacheable(sequence)
        found = [self._blocks(sequence, group, limit) for group in range(len(self._groups))]
        num_blocks = self._agree(found, limit)
        prompt = self._prompt_ending_in(sequence, num_blocks) if limit else None
        if prompt is None:
            num_tokens = num_blocks * self._block_size
            return CachedPrefix(num_tokens, self._rows(found, num_tokens, limit))
        num_tokens = min(prompt.num_tokens, sequence.num_tokens - 1)
        return CachedPrefix(num_tokens, self._rows(found, num_tokens, num_blocks), prompt.half)

    def num_cacheable(self, sequence: Sequence) -> int:
        """Whole blocks that may come from the cache: the last token is always computed."""
        if sequence.owes_prompt_logprobs:
            return 0
        return (sequence.num_tokens - 1) // self._block_size

    def _blocks(self, sequence: Sequence, group: int, limit: int) -> Row:
        """The cached block of each index below the limit; full attention stops at the first gap."""
        keys = self._keys.of(sequence, group)
        found: Row = []
        for index in range(min(limit, len(keys))):
            tokens = tokens_of(sequence, index, self._block_size)
            block = self._pool.find(group, keys[index], tokens)
            if block is None and self._groups[group].window is None:
                break
            found.append(block)
        return found

    def _agree(self, found: list[Row], limit: int) -> int:
        """The largest number of blocks for which every group has all that it needs."""
        best = min(limit, *(len(row) for row in found))  # up to there full attention has no gap
        sliding = [g for g in range(len(found)) if self._groups[g].window is not None]
        for num_blocks in range(best, 0, -1):
            if all(all(found[g][self._num_passed(g, num_blocks) : num_blocks]) for g in sliding):
                return num_blocks
        return 0

    def _num_passed(self, group: int, num_blocks: int) -> int:
        return self._groups[group].num_passed(num_blocks * self._block_size, self._block_size)

    def _rows(self, found: list[Row], num_tokens: int, limit: int) -> list[list[KVCacheBlock]]:
        """Of each group what its window still shows at `num_tokens`, and what follows without a
        gap, up to `limit` blocks."""
        rows = []
        for group, row in zip(self._groups, found, strict=True):
            passed = group.num_passed(num_tokens, self._block_size)
            present = takewhile(lambda block: block is not None, row[passed:limit])
            rows.append([self._pool.null_block] * passed + [b for b in present if b is not None])
        return rows

    def _prompt_ending_in(self, sequence: Sequence, num_blocks: int) -> BasePrompt | None:
        """The longest base prompt that begins the sequence and ends in its block `num_blocks`."""
        keys = sequence.block_keys
        if keys.num_public < num_blocks:
            return None
        ends = self._prompts.half_full(keys.base[num_blocks - 1] if num_blocks else None)
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
