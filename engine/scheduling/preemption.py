"""Who gives way when blocks are short."""

from collections.abc import Iterable

from loraplex.engine.kv.budgets import Budgets
from loraplex.engine.sequence import Sequence


def choose_victim(sequence: Sequence, others: Iterable[Sequence], budgets: Budgets) -> Sequence:
    """The sequence to be preempted so that `sequence` can have a block; it may be itself.

    At its tenant's ceiling that is one of its own tenant, since nobody else's block would help.
    Else it is one of the tenant that holds most above its floor; a tenant within its floor gives
    nothing. Within a tenant it is the last in order of the sequences preempted least often.
    A base prompt that is being computed lies within the operator's floor.
    """
    candidates = [sequence, *others]
    if not budgets.keeps_ceiling(sequence.tenant, 1):
        candidates = [s for s in candidates if s.tenant == sequence.tenant]
    victim = choose_borrower(candidates, budgets)
    if victim is not None:
        return victim
    return _least_preempted(s for s in candidates if s.tenant == sequence.tenant)


def choose_borrower(candidates: Iterable[Sequence], budgets: Budgets) -> Sequence | None:
    """One of the tenant that holds most above its floor; None where no tenant does."""
    borrowers = [s for s in candidates if budgets.over_floor(s.tenant) > 0]
    if not borrowers:
        return None
    tenant = max((s.tenant for s in borrowers), key=budgets.over_floor)
    return _least_preempted(s for s in borrowers if s.tenant == tenant)


def _least_preempted(candidates: Iterable[Sequence]) -> Sequence:
    return min(candidates, key=lambda s: (s.num_preemptions, -s.priority, -s.arrival))
