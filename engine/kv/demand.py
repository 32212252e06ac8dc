"""BlockDemand: the blocks that a sequence may still need beside those that it holds."""

from collections.abc import Sequence as Counts

from loraplex.engine.kv.budgets import Budgets
from loraplex.engine.kv.storage.layout import KVLayout
from loraplex.engine.sequence import Sequence

OPTIMISM = 2  # preemptions after which a sequence runs only with all that it may ever need
REPRIEVE = 128  # tokens that one which was preempted once can generate at least, with room for them


class BlockDemand:
    """Counts blocks for a sequence's full input, since few sequences use all of their `max_tokens`.

    Output can therefore outgrow the pool, and a sequence is preempted. Then optimism ends: on its
    first return a sequence needs room for as much output again as it had by then, on its second for
    all that it may still generate. So no sequence is preempted more than `OPTIMISM` times, unless
    shares change.
    """

    def __init__(self, layout: KVLayout, budgets: Budgets) -> None:
        self._layout = layout
        self._budgets = budgets

    def missing(self, sequence: Sequence, held: Counts[int], num_held: int) -> int:
        """Returns the blocks to be allocated, or copied from a base prompt's end, until the peak.

        One group's surplus is of no use to another: a sliding window can share more than it ever
        needs.

        Args:
            held: per group, the blocks that it has or finds in the cache.
            num_held: how many of them count against its tenant's limit.
        """
        missing = _missing(self._layout.peaks(sequence.num_tokens), held)
        if not sequence.num_preemptions:
            return missing
        expected = sequence.max_num_tokens - sequence.num_tokens
        if sequence.num_preemptions < OPTIMISM:
            expected = min(expected, max(sequence.num_output_tokens, REPRIEVE))
        later = self._layout.peaks(sequence.num_tokens + expected)
        room = self._budgets.limit(sequence.tenant) - num_held
        return max(missing, min(_missing([n * sequence.num_rows for n in later], held), room))


def _missing(peaks: Counts[int], held: Counts[int]) -> int:
    return sum(max(0, peak - count) for peak, count in zip(peaks, held, strict=True))
