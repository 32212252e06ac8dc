"""Preemption: chooses the sequence that loses its blocks when blocks run short."""

from collections.abc import Iterable

from loraplex.engine.kv.budgets import Budgets
from loraplex.engine.sequence import Sequence


def choose_victim(sequence: Sequence, others: Iterable[Sequence], budgets: Budgets) -> Sequence:
    """Returns the sequence to preempt so that `sequence` can have a block; it may be itself.

    At its tenant's ceiling the victim is one of its own tenant, since no other block would help.
    Otherwise it belongs to the tenant that holds most above its floor; a tenant within its floor
    loses nothing. Within a tenant it is the last in order of the sequences preempted least often. A
    base prompt that is being computed lies within the operator's floor.
    """
    candidates = [sequence, *others]
    if not budgets.keeps_ceiling(sequence.tenant, 1):
        candidates = [s for s in candidates if s.tenant == sequence.tenant]
    victim = choose_borrower(candidates, budgets)
    if victim is not None:
        return victim
    return _least_preempted(s for s in candidates if s.tenant == sequence.tenant)


def choose_borrower(candidates: Iterable[Sequence], budgets: Budgets) -> Sequence | None:
    """Returns a sequence of the tenant that holds most above its floor, or None."""
    borrowers = [s for s in candidates if budgets.over_floor(s.tenant) > 0]
    if not borrowers:
        return None
    tenant = max((s.tenant for s in borrowers), key=budgets.over_floor)
    return _least_preempted(s for s in borrowers if s.tenant == tenant)


def _least_preempted(candidates: Iterable[Sequence]) -> Sequence:
    return min(candidates, key=lambda s: (s.num_preemptions, -s.priority, -s.arrival))
