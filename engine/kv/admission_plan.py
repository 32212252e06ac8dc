"""AdmissionPlan: what admitting a waiting sequence takes, computed before anything is allocated."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from loraplex.engine.kv.block_pool import NULL_BLOCK_ID
from loraplex.engine.kv.demand import BlockDemand
from loraplex.engine.kv.keys import PrefixKeys
from loraplex.engine.kv.prefix_lookup import CachedPrefix, PrefixLookup
from loraplex.engine.kv.storage.layout import KVLayout
from loraplex.engine.kv.tiers import LowerTiers
from loraplex.engine.sequence import Sequence


@dataclass(frozen=True)
class AdmissionPlan:
    """What admitting one sequence takes; valid until the next block is allocated or released.

    Attributes:
        cached: what is in memory already.
        demand: blocks that the sequence takes until it is at its peak, by the account that pays.
        next_key: of the first full block that the cached prefix lacks; None if it lacks none.
        is_awaited: whether the sequence should wait for blocks on their way from a lower tier.
    """

    sequence: Sequence
    cached: CachedPrefix
    demand: Mapping[str, int]
    next_key: bytes | None
    is_awaited: bool

    @property
    def num_uncomputed_tokens(self) -> int:
        """Returns the number of tokens that are left to compute."""
        return self.sequence.num_tokens - self.cached.num_tokens


class AdmissionPlanner:
    """Looks a sequence up in every tier and counts the blocks that it still needs."""

    def __init__(
        self,
        lookup: PrefixLookup,
        keys: PrefixKeys,
        layout: KVLayout,
        demand: BlockDemand,
        tiers: LowerTiers,
    ) -> None:
        self._lookup = lookup
        self._keys = keys
        self._layout = layout
        self._demand = demand
        self._tiers = tiers

    def plan(self, sequence: Sequence) -> AdmissionPlan:
        """Plans an admission. Allocates nothing; only blocks on disk that are worth waiting for are
        requested."""
        cached = self._trim(sequence, self._find_cached(sequence))
        return AdmissionPlan(
            sequence=sequence,
            cached=cached,
            demand=self._demand_of(sequence, cached),
            next_key=self._next_key(sequence, cached),
            is_awaited=bool(cached.awaited),
        )

    def _find_cached(self, sequence: Sequence) -> CachedPrefix:
        """Returns the longest cached prefix of a sequence, in any tier. Where part of it is
        `awaited`, the sequence should wait for that part."""
        tiers = self._tiers
        anywhere = self._lookup.find(sequence, tiers.find)
        awaited = anywhere.awaited
        if not awaited:
            return anywhere
        at_hand = self._lookup.find(sequence, tiers.find_here)
        gained = anywhere.num_tokens - at_hand.num_tokens
        waits = tiers.await_blocks(sequence.seq_id, sequence.tenant, awaited, gained)
        return anywhere if waits else at_hand

    def _trim(self, sequence: Sequence, cached: CachedPrefix) -> CachedPrefix:
        """Drops blocks of a windowed group beyond all that it ever holds at once: they could exceed
        the room there is."""
        passed = self._layout.num_skipped(cached.num_tokens)
        peaks = self._layout.peaks(sequence.num_tokens)
        ends = [start + peak for start, peak in zip(passed, peaks, strict=True)]
        rows = [row[:end] for row, end in zip(cached.blocks, ends, strict=True)]
        return replace(cached, blocks=rows)

    def _demand_of(self, sequence: Sequence, cached: CachedPrefix) -> Mapping[str, int]:
        """Counts blocks by account. A shared cached block that no sequence holds counts as if the
        account that pays for it took a free one."""
        shared = [[b for b in row if b.block_id != NULL_BLOCK_ID] for row in cached.blocks]
        demand = Counter(block.account for row in shared for block in row if block.ref_count == 0)
        missing = self._demand.missing(sequence, list(map(len, shared)), demand.total())
        demand[sequence.tenant] += missing
        return demand

    def _next_key(self, sequence: Sequence, cached: CachedPrefix) -> bytes | None:
        index = cached.num_tokens // self._layout.block_size
        is_cacheable = index < self._lookup.num_cacheable(sequence)
        return self._keys.leading(sequence)[index] if is_cacheable else None
